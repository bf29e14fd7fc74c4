"""Fetches with peers beside the store: the right bytes, each chunk counted once, whatever a peer does."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetstart.prefetcher.peers import reader
from fleetstart.prefetcher.peers.connections import PeerConnections
from fleetstart.prefetcher.peers.framed import FramedServer
from fleetstart.prefetcher.peers.links import PlainLink
from fleetstart.prefetcher.peers.reader import PeerChunks
from fleetstart.prefetcher.segments import feeds
from fleetstart.prefetcher.segments.feeds import Feed
from fleetstart.prefetcher.segments.store import Segment, SegmentStore
from fleetstart.runtime.contract.ids import NodeId
from fleetstart.runtime.contract.node.peer_frames import ANSWER_BYTES
from fleetstart.runtime.contract.node.peers import Peer, Pull
from tests.prefetcher.nodes import CHUNK_BYTES, Store
from tests.prefetcher.peers.holders import Holder, holder_of, no_certificate
from tests.prefetcher.peers.tampering import FIRST_BYTES, Harm, Tampering
from tests.prefetcher.stages import ONE, Gated, Model, right
from tests.servers import wait_until
from tests.stopwatch import Stopwatch


@pytest.fixture
def holder(model: Model, store: Store) -> Iterator[Holder]:
    holder = holder_of(model, store.folder)
    yield holder
    holder.close()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, nothing that works counts as late."""
    waits(monkeypatch, 60.0)


def waits(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(reader, "STALL_S", seconds)
    monkeypatch.setattr(reader, "CHUNK_S", 2 * seconds)
    monkeypatch.setattr(reader, "WAIT_S", seconds)
    monkeypatch.setattr(reader, "ANSWER_S", seconds)
    monkeypatch.setattr(feeds, "PATIENCE_S", seconds)


def fetching(
    source: Gated, scenario: Callable[[SegmentStore], Coroutine[Any, Any, None]], *, memory_bytes: int = 1 << 30
) -> None:
    """Runs a scenario on a node that reads from peers."""

    async def main() -> None:
        connections = PeerConnections(no_certificate)
        segments = SegmentStore(
            source=source,
            memory_bytes=memory_bytes,
            workers_bytes=lambda: 0,
            threads=4,
            open_peer=lambda peer, _: PeerChunks(peer, connections),
        )
        try:
            async with asyncio.timeout(60):
                await scenario(segments)
        finally:
            connections.close()
            await segments.close()

    asyncio.run(main())
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith(("peer:", "store-"))])


async def fetched(segments: SegmentStore, model: Model, *peers: Peer, pulls: tuple[Pull, ...] = ()) -> Segment:
    segment = await segments.acquire(model.checkpoint, ONE, None, Feed(peers, pulls))
    await segment.filled.wait()
    assert segment.error is None
    assert right(segment, model, model.everything)
    assert sum(segments.fetched_bytes.values()) == len(model.data), "each chunk is counted once"
    assert sum(segments.traffic(model.checkpoint).values()) == len(model.data)
    return segment


def test_a_second_node_reads_nothing_of_the_store(holder: Holder, model: Model, gated: Gated) -> None:
    async def scenario(segments: SegmentStore) -> None:
        await fetched(segments, model, holder.peer(model.checkpoint))
        assert segments.fetched_bytes == {"peer": len(model.data)}
        assert segments.traffic(model.checkpoint) == {"peer": len(model.data), "store": 0}

    fetching(gated, scenario)
    assert not gated.given
    wait_until(lambda: sum(holder.server.sent_bytes.values()) == len(model.data), what="the bytes counted there")


def test_what_a_peer_does_not_have_comes_from_the_store(holder: Holder, model: Model, gated: Gated) -> None:
    async def scenario(segments: SegmentStore) -> None:
        await fetched(
            segments, model, msgspec.structs.replace(holder.peer(model.checkpoint), ranges=((3, 9), (12, 14)))
        )

    fetching(gated, scenario)
    assert sorted(gated.given) == sorted(model.everything - {*range(3, 9), 12, 13})


def test_pulls_say_what_comes_from_where(holder: Holder, model: Model, gated: Gated) -> None:
    async def scenario(segments: SegmentStore) -> None:
        pulls = (Pull(0, 0, 10), Pull(-1, 10, 15), Pull(0, 15, 20))
        await fetched(segments, model, holder.peer(model.checkpoint), pulls=pulls)

    fetching(gated, scenario)
    assert sorted(gated.given) == [*range(10, 15)]


STATUS_AT, REQUEST_AT, LENGTH_AT = 6, 8, 16
"""Offsets in an answer's header."""
BODY = FIRST_BYTES + ANSWER_BYTES
HARMS = {
    "flips a bit of a chunk, always": Harm(BODY + 5, lambda byte: byte ^ 1),
    "flips a bit once": Harm(BODY + 5, lambda byte: byte ^ 1, once=True),
    "gives another chunk": Harm(FIRST_BYTES + REQUEST_AT, lambda byte: byte ^ 1),
    "lies about a length": Harm(FIRST_BYTES + LENGTH_AT + 1, lambda byte: byte ^ 1),
    "promises petabytes": Harm(FIRST_BYTES + LENGTH_AT + 6, lambda byte: 255),
    "answers with another status": Harm(FIRST_BYTES + STATUS_AT, lambda byte: 77),
    "talks nonsense at first": Harm(0, lambda byte: byte ^ 255),
    "is cut off in a chunk": Harm(BODY + CHUNK_BYTES // 2, lambda byte: None),
    "is cut off in its greeting": Harm(10, lambda byte: None),
    "stalls in a chunk": Harm(BODY + CHUNK_BYTES // 2, hold=True),
    "never answers": Harm(FIRST_BYTES, hold=True),
    "drips": Harm(BODY + 100, drip_s=0.02),
}


@pytest.mark.parametrize("native", [True, False], ids=["native", "framed"])
@pytest.mark.parametrize("name", HARMS)
def test_a_hostile_peer_costs_its_chunks_some_time(
    holder: Holder, model: Model, gated: Gated, monkeypatch: pytest.MonkeyPatch, name: str, native: bool
) -> None:
    """Framed is what goes through TLS."""
    if not native:
        monkeypatch.setattr(PlainLink, "native_fd", lambda _: None)
    harm = HARMS[name]
    if harm.hold or harm.drip_s or "length" in name or "petabytes" in name:
        waits(monkeypatch, 0.3)
    tampering = Tampering(holder.address, harm)
    peer = msgspec.structs.replace(holder.peer(model.checkpoint), address=tampering.address)

    async def scenario(segments: SegmentStore) -> None:
        await fetched(segments, model, peer)

    fetching(gated, scenario)
    tampering.close()
    if harm.once:
        assert not gated.given, "one wrong chunk is read once more"


def test_a_peer_that_refuses_is_done_without(holder: Holder, model: Model, gated: Gated) -> None:
    async def scenario(segments: SegmentStore) -> None:
        await fetched(segments, model, holder.peer(model.checkpoint, life_s=-1.0))

    fetching(gated, scenario)
    assert sorted(gated.given) == sorted(model.everything)


def test_a_grant_that_ends_in_mid_fetch_ends_no_fetch(
    holder: Holder, model: Model, gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlainLink, "native_fd", lambda _: None)
    answer, answered = FramedServer._answer_one, count()

    def slowly(self: FramedServer) -> None:
        if next(answered) >= 3:
            time.sleep(max(0.0, self._until_s - time.monotonic()) + 0.01)
        else:
            answer(self)

    monkeypatch.setattr(FramedServer, "_answer_one", slowly)

    async def scenario(segments: SegmentStore) -> None:
        await fetched(segments, model, holder.peer(model.checkpoint, life_s=1.5))
        assert segments.fetched_bytes["peer"] == 3 * CHUNK_BYTES

    fetching(gated, scenario)


def test_a_late_peer_is_replaced_in_mid_chunk_by_one_with_nothing_to_do(
    holder: Holder, model: Model, gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before the peer itself would be given up."""
    monkeypatch.setattr(feeds, "PATIENCE_S", 0.3)
    tampering = Tampering(holder.address, Harm(FIRST_BYTES + ANSWER_BYTES + 100, drip_s=0.05))
    peer = msgspec.structs.replace(holder.peer(model.checkpoint), address=tampering.address)

    async def scenario(segments: SegmentStore) -> None:
        await fetched(segments, model, peer)

    fetching(gated, scenario)
    tampering.close()


def test_a_planned_holder_that_falls_silent_is_replaced_by_another_in_seconds(
    holder: Holder, model: Model, store: Store, gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the times as they are: the plan waits for nobody who does not say that it waits itself."""
    monkeypatch.undo()
    other = holder_of(model, store.folder)
    sound = FIRST_BYTES + 5 * (ANSWER_BYTES + CHUNK_BYTES)
    tampering = Tampering(holder.address, Harm(sound, hold=True))
    silent = msgspec.structs.replace(holder.peer(model.checkpoint), address=tampering.address)
    second = msgspec.structs.replace(other.peer(model.checkpoint), node=NodeId("second"))
    watch = Stopwatch()

    async def scenario(segments: SegmentStore) -> None:
        await fetched(segments, model, silent, second, pulls=(Pull(0, 0, len(model.everything)),))

    fetching(gated, scenario)
    assert watch.unhindered_s < 15, "it was 18 s: three to five are expected where nothing else runs"
    assert not gated.given
    tampering.close()
    other.close()


def test_new_pulls_take_the_place_of_those_of_a_holder_that_died(
    holder: Holder, model: Model, store: Store, gated: Gated
) -> None:
    """As the controller plans a multicast anew: nothing more is waited for from who is not named any more."""
    gated.gate.clear()
    other = holder_of(model, store.folder)
    tampering = Tampering(holder.address, Harm(FIRST_BYTES + 3 * (ANSWER_BYTES + CHUNK_BYTES), hold=True))
    dying = msgspec.structs.replace(holder.peer(model.checkpoint), address=tampering.address)
    second = msgspec.structs.replace(other.peer(model.checkpoint), node=NodeId("second"))
    every = (Pull(0, 0, len(model.everything)),)

    async def scenario(segments: SegmentStore) -> None:
        segment = await segments.acquire(model.checkpoint, ONE, None, Feed((dying,), every))
        await asyncio.to_thread(wait_until, lambda: segments.fetched_bytes.get("peer"), what="a chunk of the first")
        segments.feed(segment, Feed((second,), every))
        tampering.close()
        await segment.filled.wait()
        assert right(segment, model, model.everything)
        traffic = segments.traffic(model.checkpoint)
        assert traffic == {"peer": len(model.data), "store": 0}

    fetching(gated, scenario)
    assert not gated.given
    other.close()


def test_a_changed_order_adds_a_peer_to_a_fetch_under_way(holder: Holder, model: Model, gated: Gated) -> None:
    gated.gate.clear()

    async def scenario(segments: SegmentStore) -> None:
        segment = await segments.acquire(model.checkpoint, ONE)
        await asyncio.to_thread(wait_until, lambda: gated.waiting == 4, what="the store's threads at the gate")
        segments.feed(segment, Feed((holder.peer(model.checkpoint),)))
        await asyncio.to_thread(
            wait_until, lambda: segments.fetched_bytes.get("peer", 0) >= 21 * CHUNK_BYTES, what="what was left"
        )
        gated.gate.set()
        await segment.filled.wait()
        assert right(segment, model, model.everything)

    fetching(gated, scenario)
    assert len(gated.given) == 4


def test_several_peers_share_the_chunks(holder: Holder, model: Model, store: Store, gated: Gated) -> None:
    other = holder_of(model, store.folder)

    async def scenario(segments: SegmentStore) -> None:
        second = msgspec.structs.replace(other.peer(model.checkpoint), node=NodeId("second"))
        segment = await fetched(segments, model, holder.peer(model.checkpoint), second)
        assert segment.fetch is not None
        traffic = segment.fetch.traffic()
        assert set(traffic) == {"peer:holder", "peer:second", "store"}
        assert traffic["store"] == (0, 0.0)

    fetching(gated, scenario)
    other.close()


def test_a_node_passes_on_what_it_is_still_fetching(model: Model, store: Store, gated: Gated, tmp_path: Path) -> None:
    """The holder's store is held back; what is asked of it waits for it."""
    slow = Gated(store.folder)
    slow.gate.clear()
    holder = Holder(slow)
    holder.hold(model.checkpoint, whole=False)
    threading.Timer(0.2, slow.gate.set).start()

    async def scenario(segments: SegmentStore) -> None:
        await fetched(segments, model, holder.peer(model.checkpoint))

    fetching(gated, scenario)
    assert not gated.given
    holder.close()


def test_a_stage_takes_only_its_chunks_from_a_peer(holder: Holder, model: Model, gated: Gated) -> None:
    async def scenario(segments: SegmentStore) -> None:
        segment = await segments.acquire(model.checkpoint, ONE, (2, 4), Feed((holder.peer(model.checkpoint),)))
        await segment.filled.wait()
        assert right(segment, model, model.chunks(2, 4))
        assert segments.fetched_bytes == {"peer": len(model.chunks(2, 4)) * CHUNK_BYTES}
        await segments.grow(segment)
        assert right(segment, model, model.everything), "the rest comes in the background"
        assert segments.fetched_bytes == {"peer": len(model.data)}

    fetching(gated, scenario)
    assert not gated.given
