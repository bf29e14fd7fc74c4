"""Hands bundle, segments and connections to workers in sandboxes that were made before their function was known.

The bundle is sent as a tar in memory: each sandbox has a copy of its own. Into a running sandbox of gVisor no folder
can be mounted, so it is started with those that it must see. To a worker in it writable memory is useless, so segments
are sent as read-only descriptors; its sockets are its own, so the node listens for it (`network.ingress_proxy`). A
container shares the node's kernel, and gets memory and its listening socket as a worker in namespaces does; packages
and volumes are mounted into it, and its /tmp and /dev/shm are given their size. One that was prepared for a version has
its bundle and packages already.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fleetstart.runtime.contract.errors import StartFailed
from fleetstart.runtime.contract.function.layer import LAYER_DIR
from fleetstart.runtime.contract.function.spec import FunctionSpec, Isolation
from fleetstart.runtime.contract.node.channel import ChannelClosed
from fleetstart.runtime.contract.node.messages import Assign, ClientConnection, Prepare
from fleetstart.runtime.contract.sizes import MIB

from ..concurrency.threads import in_thread
from ..processes.container_mounts import limit_tmpfs, show_folders
from ..processes.forked_process import ForkedProcess
from ..segments.store import Segment
from .bundles import pack_tar

if TYPE_CHECKING:
    from .node_services import NodeServices
    from .worker_process import WorkerProcess

GVISOR_BYTES = 128 * MIB
"""Memory of gVisor's kernel and file server, beside what the function asked for."""


class Sandbox(Protocol):
    """The resources of one worker in a sandbox."""

    extra_bytes: int
    """Memory of the sandbox itself, beside what the function asked for."""
    takes_folders: bool
    """True if packages and volumes can be mounted into it when it runs."""

    async def prepare(self, bundle: Path, segments: Sequence[Segment]) -> None:
        """Packs the bundle for a process that was not prepared for its version. Errors: StartFailed if the worker could
        not map the node's memory, OSError."""

    def send(
        self,
        process: ForkedProcess,
        assign: Assign,
        listener: socket.socket,
        streams: Iterable[int],
        memory: Iterable[int],
        folders: Mapping[str, str],
    ) -> None:
        """Mounts the folders (by path inside), if it takes any, and sends the assignment with bundle, streams and
        segments. Errors: StartFailed if its image cannot take what it must have, ChannelClosed, OSError."""

    def close(self) -> None: ...


def sandbox_for(isolation: Isolation, services: NodeServices, process: WorkerProcess) -> Sandbox | None:
    """The sandbox of a worker; None if it is in namespaces."""
    match isolation:
        case "namespaces":
            return None
        case "gvisor":
            return GVisorSandbox(services, process)
        case "container":
            return ContainerSandbox()


async def send_preparation(process: ForkedProcess, message: Prepare) -> None:
    """Tells a waiting process what it is to prepare; gives a container its bundle and packages. Errors: StartFailed,
    ChannelClosed, OSError."""
    if message.spec.isolation != "container":
        process.send(message)
        return
    packed, folders = _PackedBundle(), {LAYER_DIR: message.layer_dir}
    try:
        await packed.pack(Path(message.bundle_dir))
        await in_thread(lambda: _furnish(process, message.spec, folders), "container-mounts")
        process.send(message, (packed.rewound(),))
    finally:
        packed.close()


def _furnish(process: ForkedProcess, spec: FunctionSpec, folders: Mapping[str, str]) -> None:
    """Gives a container's memory file systems their size, and mounts folders into it. Errors: StartFailed if its image
    has a link in the place of one, OSError."""
    for folder in ("/tmp", "/dev/shm"):  # a half of its memory together, as in namespaces
        try:
            limit_tmpfs(process.pid, folder, spec.memory_bytes // 4)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise StartFailed(
                f"the image {spec.image} has a symbolic link in the place of {folder}",
                hint=f"make {folder} a folder of the image, or leave it out",
            ) from error
    if folders:
        show_folders(process.pid, folders)


class _PackedBundle:
    """A bundle as a tar in memory, until it was sent."""

    def __init__(self) -> None:
        self.descriptor = -1

    @property
    def is_packed(self) -> bool:
        return self.descriptor >= 0

    async def pack(self, bundle: Path) -> None:
        self.descriptor = await in_thread(lambda: pack_tar(bundle), f"bundle-{bundle.name[:8]}")

    def rewound(self) -> int:
        os.lseek(self.descriptor, 0, os.SEEK_SET)
        return self.descriptor

    def close(self) -> None:
        """Closes our descriptor of the packed bundle, which may be large and is in memory."""
        if self.is_packed:
            os.close(self.descriptor)
            self.descriptor = -1


class ContainerSandbox:
    """The resources of one worker in a container of the node's engine."""

    extra_bytes = 0
    takes_folders = True

    def __init__(self) -> None:
        self._bundle = _PackedBundle()

    async def prepare(self, bundle: Path, segments: Sequence[Segment]) -> None:
        await self._bundle.pack(bundle)

    def send(
        self,
        process: ForkedProcess,
        assign: Assign,
        listener: socket.socket,
        streams: Iterable[int],
        memory: Iterable[int],
        folders: Mapping[str, str],
    ) -> None:
        own: tuple[int, ...] = ()
        if self._bundle.is_packed:
            _furnish(process, assign.spec, folders)
            own = (self._bundle.rewound(),)
        process.send(assign, (listener.fileno(), *own, *streams, *memory))
        self._bundle.close()

    def close(self) -> None:
        self._bundle.close()


class GVisorSandbox:
    """The resources of one worker inside gVisor."""

    extra_bytes = GVISOR_BYTES
    takes_folders = False

    def __init__(self, services: NodeServices, process: WorkerProcess) -> None:
        self._services = services
        self._process = process
        self._bundle = _PackedBundle()
        self._close_ingress: Callable[[], None] = lambda: None

    async def prepare(self, bundle: Path, segments: Sequence[Segment]) -> None:
        if segments and self._services.segments.budget.memory.report().pages == "hugetlb":
            raise StartFailed(
                "this node keeps weights in reserved huge pages, which gVisor cannot map",
                hint="free them there (sysctl vm.nr_hugepages=0) and restart the node, or leave out isolation",
            )
        await self._bundle.pack(bundle)

    def send(
        self,
        process: ForkedProcess,
        assign: Assign,
        listener: socket.socket,
        streams: Iterable[int],
        memory: Iterable[int],
        folders: Mapping[str, str],
    ) -> None:
        """Also starts to accept connections."""
        with contextlib.ExitStack() as opened:
            descriptors = [self._bundle.rewound(), *streams]
            for descriptor in memory:
                # gVisor maps with the rights of the descriptor when it copies (weights written to a socket), and the
                # seals of the memory forbid a writable mapping.
                descriptors.append(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC))
                opened.callback(os.close, descriptors[-1])
            process.send(assign, tuple(descriptors))
        self._bundle.close()
        self._close_ingress = self._services.ingress.open(listener.dup(), assign.spec.concurrency, self._forward)

    def _forward(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(ChannelClosed):
            if self._process.forked is not None:
                self._process.forked.send(ClientConnection(), (connection.fileno(),))

    def close(self) -> None:
        self._close_ingress()
        self._bundle.close()
