"""Hands bundle, segments and connections to a worker inside gVisor, which cannot mount folders or map writable memory.

Folders cannot be mounted into a running sandbox, so the bundle is sent as a tar in memory. Writable memory is
useless to it, so segments are sent as read-only descriptors. Its sockets are its own, so the node listens for it
(`network.ingress_proxy`).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fleetstart.runtime.contract.errors import StartFailed
from fleetstart.runtime.contract.node.channel import ChannelClosed
from fleetstart.runtime.contract.node.messages import Assign, ClientConnection
from fleetstart.runtime.contract.sizes import MIB

from ..concurrency.threads import in_thread
from ..processes.forked_process import ForkedProcess
from ..segments.store import Segment
from .bundles import pack_tar
from .node_services import NodeServices
from .worker_process import WorkerProcess

SANDBOX_BYTES = 128 * MIB
"""Memory of gVisor's kernel and file server, beside what the function asked for."""


class GVisorSandbox:
    """The resources of one worker inside gVisor."""

    def __init__(self, services: NodeServices, process: WorkerProcess) -> None:
        self._services = services
        self._process = process
        self._bundle = -1
        self._close_ingress: Callable[[], None] = lambda: None

    async def prepare(self, bundle: Path, segments: Sequence[Segment]) -> None:
        """Packs the bundle. Errors: StartFailed if the node's pages cannot be mapped, OSError."""
        if segments and self._services.segments.budget.memory.report().pages == "hugetlb":
            raise StartFailed(
                "this node keeps weights in reserved huge pages, which gVisor cannot map",
                hint="free them there (sysctl vm.nr_hugepages=0) and restart the node, or leave out isolation",
            )
        self._bundle = await in_thread(lambda: pack_tar(bundle), f"bundle-{bundle.name[:8]}")

    def send(
        self,
        process: ForkedProcess,
        assign: Assign,
        listener: socket.socket,
        streams: Iterable[int],
        memory: Iterable[int],
    ) -> None:
        """Sends the assignment with bundle and segments, and starts to accept connections. Errors: ChannelClosed,
        OSError."""
        os.lseek(self._bundle, 0, os.SEEK_SET)
        with contextlib.ExitStack() as opened:
            descriptors = [self._bundle, *streams]
            for descriptor in memory:
                # gVisor maps with the rights of the descriptor when it copies (weights written to a socket), and the
                # seals of the memory forbid a writable mapping.
                descriptors.append(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC))
                opened.callback(os.close, descriptors[-1])
            process.send(assign, tuple(descriptors))
        self._drop_bundle()
        self._close_ingress = self._services.ingress.open(listener.dup(), assign.spec.concurrency, self._forward)

    def _forward(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(ChannelClosed):
            if self._process.forked is not None:
                self._process.forked.send(ClientConnection(), (connection.fileno(),))

    def close(self) -> None:
        self._close_ingress()
        self._drop_bundle()

    def _drop_bundle(self) -> None:
        """Closes our descriptor of the packed bundle, which may be large and is in memory."""
        if self._bundle >= 0:
            os.close(self._bundle)
            self._bundle = -1
