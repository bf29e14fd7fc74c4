"""What a worker inside gVisor gets in another form than others: folders cannot be shown to it once it runs, sockets
that listen and memory that somebody may write are of no use to it.

So its bundle goes as a tar in memory, its segments by descriptors that can only be read, and its node listens for it
(`doorway`).
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

from ..concurrency.blocking import in_thread
from ..drivers.forked_process import ForkedProcess
from ..segments.store import Segment
from .bundles import pack_tar
from .node_services import NodeServices
from .worker_process import WorkerProcess

SANDBOX_BYTES = 128 * MIB
"""Of its kernel and its file server, beside what the function asked for."""


class GVisorSandbox:
    """Of one worker."""

    def __init__(self, services: NodeServices, process: WorkerProcess) -> None:
        self._services = services
        self._process = process
        self._bundle = -1
        self._end_doorway: Callable[[], None] = lambda: None

    async def prepare(self, bundle: Path, segments: Sequence[Segment]) -> None:
        """Errors: StartFailed, OSError."""
        if segments and self._services.segments.budget.memory.report().pages == "hugetlb":
            raise StartFailed(
                "this node keeps weights in reserved huge pages, which gVisor cannot map",
                hint="free them there (sysctl vm.nr_hugepages=0) and restart the node, or leave out isolation",
            )
        self._bundle = await in_thread(lambda: pack_tar(bundle), f"bundle-{bundle.name[:8]}")

    def send(self, process: ForkedProcess, assign: Assign, listener: socket.socket, memory: Iterable[int]) -> None:
        """Errors: ChannelClosed, OSError."""
        os.lseek(self._bundle, 0, os.SEEK_SET)
        with contextlib.ExitStack() as opened:
            descriptors = [self._bundle]
            for descriptor in memory:
                # Where the sandbox copies out of it (weights written to a socket), it maps it as the descriptor would
                # allow, which the seals of one that is writable forbid.
                descriptors.append(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC))
                opened.callback(os.close, descriptors[-1])
            process.send(assign, tuple(descriptors))
        self._drop_bundle()
        self._end_doorway = self._services.ingress.open(listener.dup(), assign.spec.concurrency, self._hand)

    def _hand(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(ChannelClosed):
            if self._process.forked is not None:
                self._process.forked.send(ClientConnection(), (connection.fileno(),))

    def close(self) -> None:
        self._end_doorway()
        self._drop_bundle()

    def _drop_bundle(self) -> None:
        """Whoever has it has it: it may be large, and is in memory."""
        if self._bundle >= 0:
            os.close(self._bundle)
            self._bundle = -1
