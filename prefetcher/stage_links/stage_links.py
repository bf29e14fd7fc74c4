"""Sockets between pipeline stages: a listener for this node's stage, and connections to the other stages.

Workers have no network: their node opens the sockets, in its own, and passes them on. The order says which stage is
where, and again when that changes; existing connections stay. A stage that cannot be reached directly is reached
through the object store (`relay`), if there is one: the controller tells its node, which then receives there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Sequence

from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.identity import Identity, is_loopback
from fleetstart.runtime.contract.node.channel import ChannelClosed
from fleetstart.runtime.contract.node.messages import Consolidate, Peers
from fleetstart.runtime.contract.node.orders import NO_PEER, WorkerOrder
from fleetstart.runtime.contract.weights.stage import Stage

from ..network.served_socket import listening_socket, only_serve
from ..processes.forked_process import ForkedProcess
from ..segments.store import Segment, SegmentStore
from .pipeline_key import link_identity
from .relay import Relays
from .relay_messages import RelayLink

log = logging.getLogger(__name__)

BACKLOG = 16
CONNECT_S = 0.5
"""Timeout of a connection: hosts that take longer are too far from each other for a pipeline."""
RETRY_S = 0.1
ATTEMPTS = 2
"""Attempts for one address: about a second, then the relay is used."""


class StageSockets:
    """The sockets of one stage. `connected` gets each connection with its stage's index, and owns it. `open_relay`
    returns a relayed connection to a stage that cannot be reached for the given reason, or None."""

    def __init__(
        self,
        stage: Stage,
        address: str,
        connected: Callable[[int, socket.socket], None],
        open_relay: Callable[[int, str], socket.socket | None],
    ) -> None:
        """Errors: OSError if the address cannot be listened on."""
        self._stage = stage
        self._connected = connected
        self._open_relay = open_relay
        self._known: dict[int, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.listener = listening_socket(address, BACKLOG)
        self._at: tuple[str, int] = self.listener.getsockname()[:2]

    @property
    def link(self) -> str:
        """host:port for the other stages to connect to."""
        host, port = self._at
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def connect_peers(self, peers: Sequence[str]) -> None:
        """Connects to the stages at these addresses, by index; empty addresses are not known yet."""
        for index, address in enumerate(peers):
            if index == self._stage.index or not address or index in self._known:
                continue
            self._known[index] = address
            if address == NO_PEER:
                self._connected(index, _closed_connection())
                continue
            task = asyncio.create_task(self._connect(index, address), name=f"link-{self._stage.pipeline}-{index}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, index: int, address: str) -> None:
        why = ""
        for _ in range(ATTEMPTS):
            try:
                link = await _connection(address)
            except (OSError, ValueError, OverflowError) as error:  # the latter two: a malformed address
                why = f"{address}: {str(error) or f'no answer in {CONNECT_S:g} s'}"
                log.warning("a stage could not be reached", extra={"stage": index, "why": why})
                await asyncio.sleep(RETRY_S)
                continue
            self._connected(index, link)
            return
        self._connected(index, self._open_relay(index, why) or _closed_connection())

    def connect_to_listener(self) -> socket.socket:
        """A connection like another stage's, from any thread. Errors: OSError."""
        link = socket.create_connection(self._at, timeout=CONNECT_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return link

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self.listener.close()


async def _connection(address: str) -> socket.socket:
    """Connects to a stage. Errors: OSError, which includes TimeoutError; ValueError and OverflowError for a
    malformed address."""
    host, _, port = address.rpartition(":")
    link = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        link.setblocking(False)
        async with asyncio.timeout(CONNECT_S):
            await asyncio.get_running_loop().sock_connect(link, (host.strip("[]"), int(port)))
        only_serve(link)
        link.setblocking(True)
    except BaseException:
        link.close()
        raise
    return link


def _closed_connection() -> socket.socket:
    """A connection to a lost stage: writing to it fails at once, as with any closed connection."""
    link, other = socket.socketpair()
    other.close()
    return link


class PipelineMembership:
    """A worker's part in its pipeline; empty for a worker with the whole model."""

    def __init__(
        self,
        order: WorkerOrder,
        address: str,
        relays: Relays | None,
        note: Callable[[str], object],
        changed: Callable[[], object],
    ) -> None:
        """`note` writes to the worker's log; `changed` is called after `relayed` has changed.

        Errors: OSError if the address cannot be listened on.
        """
        self._order = order
        self._relays = relays
        self._note = note
        self._changed = changed
        self._closed = False
        self._received: dict[int, Callable[[], None]] = {}
        """By sending stage, the function that stops its relayed link."""
        self.relayed: tuple[int, ...] = ()
        """Stages that are reached through the object store."""
        self._process: ForkedProcess | None = None
        self._early: list[tuple[int, socket.socket]] = []
        """Connections made before the worker had its assignment."""
        self._growing: asyncio.Task[None] | None = None
        self.whole = order.stage is None
        """True if it needs no other worker."""
        self.sockets: StageSockets | None = None
        self.link_identity: Identity | None = None
        """What its worker proves itself with to stages on other machines; None if others cannot reach this node."""
        if order.stage is not None:
            if not is_loopback(address):
                self.link_identity = link_identity(order.stage.pipeline, order.secret)
            self.sockets = StageSockets(order.stage, address, self._connected, self._open_relay)
            self.update(order)

    @property
    def link(self) -> str:
        return self.sockets.link if self.sockets is not None else ""

    @property
    def layers(self) -> tuple[int, int] | None:
        """Layers of the checkpoint that it needs; None for all."""
        stage = self._order.stage
        return None if stage is None else (stage.first, stage.end)

    @property
    def serves(self) -> bool:
        """True if it takes calls: the first stage does, another one only once it has the whole model."""
        return self.whole or (self._order.stage is not None and self._order.stage.index == 0)

    def descriptors(self) -> list[int]:
        """Descriptors that go with the worker's assignment."""
        return [self.sockets.listener.fileno()] if self.sockets is not None else []

    def assigned(self, process: ForkedProcess) -> None:
        """Passes connections to the process from now on, those made before first."""
        self._process = process
        early, self._early = self._early, []
        for index, link in early:
            self._connected(index, link)

    def update(self, order: WorkerOrder) -> None:
        """Applies an order's addresses of other stages, relayed stages, and permission to grow."""
        self._order = order
        if self.sockets is None:
            return
        self.sockets.connect_peers(order.peers)
        for sender in order.relayed:
            if self._relays is not None and self._is_other(sender) and sender not in self._received:
                log.info(
                    "a stage is received through the object store", extra={"worker": order.worker, "stage": sender}
                )
                self._received[sender] = self._relays.receive(
                    self._link(sender, self._stage.index),
                    self.sockets.connect_to_listener,
                    self._relay_failure_callback(),
                )

    def grow(self, segments: SegmentStore, segment: Segment) -> None:
        """Fetches the whole model in the background, if the order says so. Called once the worker serves: until then
        the link is for the pipeline's own chunks."""
        if self._order.grow and self._growing is None and not self.whole:
            self._growing = asyncio.create_task(self._grow(segments, segment), name=f"grow-{self._order.worker}")

    async def _grow(self, segments: SegmentStore, segment: Segment) -> None:
        try:
            await segments.grow(segment)
        except FleetError as error:
            log.warning("a stage cannot grow", extra={"worker": self._order.worker, "error": error.message})
            self._growing = None
            return
        self._send(Consolidate())

    def close(self) -> None:
        if self._growing is not None:
            self._growing.cancel()
        if self.sockets is not None:
            self.sockets.close()
        self._closed = True
        for stop in self._received.values():
            stop()
        for _, link in self._early:
            link.close()
        self._early.clear()

    # ── relayed links ──────────────────────────────────────────────────────────────────────────────

    @property
    def _stage(self) -> Stage:
        assert self._order.stage is not None
        return self._order.stage

    def _is_other(self, index: int) -> bool:
        return 0 <= index < self._stage.count and index != self._stage.index

    def _link(self, sender: int, receiver: int) -> RelayLink:
        order = self._order
        return RelayLink(pipeline=self._stage.pipeline, sender=sender, receiver=receiver, secret=order.secret)

    def _open_relay(self, index: int, why: str) -> socket.socket | None:
        if self._relays is None or not self._is_other(index):
            return None
        theirs, ours = socket.socketpair()
        self._relays.send(self._link(self._stage.index, index), ours, self._relay_failure_callback())
        worker = self._order.worker
        log.warning("a stage is reached through the object store", extra={"worker": worker, "stage": index, "why": why})
        self._note(f"stage {index} cannot be reached directly ({why}): the object store is the way to it")
        self.relayed = tuple(sorted({*self.relayed, index}))
        self._changed()
        return theirs

    def _relay_failure_callback(self) -> Callable[[str], None]:
        """A callback for a relay's threads, which may outlive the event loop by a moment."""
        loop = asyncio.get_running_loop()

        def failed(why: str) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._on_relay_failed, why)

        return failed

    def _on_relay_failed(self, why: str) -> None:
        if self._closed or self.whole:  # its pipeline has ended, and the other stages with it
            return
        log.warning("a link through the object store broke", extra={"worker": self._order.worker, "why": why})
        self._note(f"a link through the object store broke: {why}")

    # ── messages to the worker ─────────────────────────────────────────────────────────────────────

    def _connected(self, index: int, link: socket.socket) -> None:
        if self._process is None:
            self._early.append((index, link))
            return
        with link:
            self._send(Peers([index]), link.fileno())

    def _send(self, message: Peers | Consolidate, *descriptors: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ChannelClosed):  # its exit event is on the way
                self._process.send(message, descriptors)
