"""The node's part in a pipeline's links: a listener for its stage, and connections to the other stages.

Workers have no network: their node opens the sockets, in its own, and hands them on. Which stage is where comes with
the order, and again when that changes; what was connected stays so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Sequence

from fleetstart.prefetcher.forkserver import Process
from fleetstart.prefetcher.segments import Segment, Segments
from fleetstart.runtime.contract.channel import ChannelClosed
from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.messages import NO_PEER, Grow, Peers, WorkerOrder
from fleetstart.runtime.contract.stage import Stage

log = logging.getLogger(__name__)

BACKLOG = 16
CONNECT_S = 1.0
RETRY_S = 0.1
TRIES = 3
"""Of one address: a stage that cannot be reached in some seconds is lost."""


class StageSockets:
    """One stage's. `connected` gets each connection with the stage's index, and owns it from then on."""

    def __init__(self, stage: Stage, address: str, connected: Callable[[int, socket.socket], None]) -> None:
        """Errors: OSError if nothing can listen there."""
        self._stage = stage
        self._connected = connected
        self._known: dict[int, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.listener = socket.create_server((address, 0), family=family, backlog=BACKLOG)

    @property
    def link(self) -> str:
        """host:port at which the other stages are to connect."""
        host, port = self.listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def tell(self, peers: Sequence[str]) -> None:
        """Where the stages are, by index, as far as it is known."""
        for index, address in enumerate(peers):
            if index == self._stage.index or not address or index in self._known:
                continue
            self._known[index] = address
            if address == NO_PEER:
                self._connected(index, _dead())
                continue
            task = asyncio.create_task(self._connect(index, address), name=f"link-{self._stage.pipeline}-{index}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, index: int, address: str) -> None:
        for _ in range(TRIES):
            try:
                link = await _connection(address)
            except (OSError, ValueError, OverflowError) as error:  # the others: no address at all
                log.warning("a stage could not be reached", extra={"address": address, "error": str(error)})
                await asyncio.sleep(RETRY_S)
                continue
            self._connected(index, link)
            return
        self._connected(index, _dead())

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self.listener.close()


async def _connection(address: str) -> socket.socket:
    """Errors: OSError, also for a TimeoutError; ValueError and OverflowError for what is no address."""
    host, _, port = address.rpartition(":")
    link = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        link.setblocking(False)
        async with asyncio.timeout(CONNECT_S):
            await asyncio.get_running_loop().sock_connect(link, (host.strip("[]"), int(port)))
        link.setblocking(True)
    except BaseException:
        link.close()
        raise
    return link


def _dead() -> socket.socket:
    """A connection to a stage that is lost: whoever sends on it learns that at once, as of any other."""
    link, other = socket.socketpair()
    other.close()
    return link


class Role:
    """A worker's part in its pipeline; one with the whole model from the beginning has none."""

    def __init__(self, order: WorkerOrder, address: str) -> None:
        """Errors: OSError if nothing can listen at the address."""
        self._order = order
        self._process: Process | None = None
        self._early: list[tuple[int, socket.socket]] = []
        """Connected before the worker had its assignment."""
        self._growing: asyncio.Task[None] | None = None
        self.whole = order.stage is None
        """Whether it needs no other worker."""
        self.sockets = StageSockets(order.stage, address, self._connected) if order.stage is not None else None
        if self.sockets is not None:
            self.sockets.tell(order.peers)

    @property
    def link(self) -> str:
        return self.sockets.link if self.sockets is not None else ""

    @property
    def layers(self) -> tuple[int, int] | None:
        """What of the checkpoint it needs; None for all."""
        stage = self._order.stage
        return None if stage is None else (stage.first, stage.end)

    @property
    def serves(self) -> bool:
        """Whether calls may come to it: to a stage that is not the first, only once it has grown."""
        return self.whole or (self._order.stage is not None and self._order.stage.index == 0)

    def descriptors(self) -> list[int]:
        """What goes with the worker's assignment."""
        return [self.sockets.listener.fileno()] if self.sockets is not None else []

    def assigned(self, process: Process) -> None:
        """From now on it can be told."""
        self._process = process
        early, self._early = self._early, []
        for index, link in early:
            self._connected(index, link)

    def tell(self, order: WorkerOrder) -> None:
        """Where the other stages are by now, and whether it shall become a whole worker."""
        self._order = order
        if self.sockets is not None:
            self.sockets.tell(order.peers)

    def grow(self, segments: Segments, segment: Segment) -> None:
        """If its order says so. Called once it serves: until then the link is for what its pipeline waits for."""
        if self._order.grow and self._growing is None and not self.whole:
            self._growing = asyncio.create_task(self._grow(segments, segment), name=f"grow-{self._order.worker}")

    async def _grow(self, segments: Segments, segment: Segment) -> None:
        try:
            await segments.grow(segment)
        except FleetError as error:
            log.warning("a stage cannot grow", extra={"worker": self._order.worker, "error": error.message})
            self._growing = None
            return
        self._send(Grow())

    def close(self) -> None:
        if self._growing is not None:
            self._growing.cancel()
        if self.sockets is not None:
            self.sockets.close()
        for _, link in self._early:
            link.close()
        self._early.clear()

    def _connected(self, index: int, link: socket.socket) -> None:
        if self._process is None:
            self._early.append((index, link))
            return
        with link:
            self._send(Peers([index]), link.fileno())

    def _send(self, message: Peers | Grow, *descriptors: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ChannelClosed):  # its end is on the way and will be heard
                self._process.send(message, descriptors)
