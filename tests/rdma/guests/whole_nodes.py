"""Two nodes as their daemons have them, one in each guest: a fetch that begins by RDMA and ends by TCP.

The holder has the first chunks; the others it is still receiving. When the first have come, its end of the RDMA
connections is cut, and its own fetch goes on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fleetstart.prefetcher.peers import connections, rdma, reader, session
from fleetstart.prefetcher.peers.node_peers import NodePeers
from fleetstart.prefetcher.segments import feeds
from fleetstart.prefetcher.segments.feeds import Feed
from fleetstart.prefetcher.segments.store import SegmentStore
from fleetstart.prefetcher.sources.base import ObjectRange
from fleetstart.prefetcher.sources.folder import FolderSource
from fleetstart.runtime.contract.ids import CheckpointId, NodeId, WorkerId
from fleetstart.runtime.contract.node.peers import Grant, Peer, grant_secret
from tests.rdma.guests import region as shared

EPOCH = "e-1"
KEY = bytes(32)
OWNER = WorkerId("w-1")
MEMORY_BYTES = 64 << 20
CALM_S = 30.0
LIMIT_S = 60.0
NODES = {shared.HOLDER: NodeId("holder"), shared.READER: NodeId("reader")}


class Halting(FolderSource):
    """A store that gives the chunks from `first_held` on once its gate is open."""

    run_bytes = 1
    threads = 1

    def __init__(self, root: Path, first_held: int, chunk_bytes: int) -> None:
        super().__init__(root)
        self._held_from = first_held * chunk_bytes
        self.is_open = False
        self.read_bytes = 0

    def read(self, asked: ObjectRange, stopped: Callable[[], bool]) -> Any:
        while asked.offset >= self._held_from and not self.is_open and not stopped():
            time.sleep(0.02)
        for piece, checksum in zip(asked.pieces, super().read(asked, stopped), strict=True):
            self.read_bytes += piece.size_bytes
            yield checksum


def be_patient() -> None:
    """An emulated guest stands still for seconds."""
    times: tuple[tuple[Any, tuple[str, ...]], ...] = (
        (rdma, ("CONNECT_S", "SILENCE_S", "STALL_S")),
        (reader, ("STALL_S", "ANSWER_S", "CHUNK_S")),
        (connections, ("CONNECT_S", "HELLO_S")),
        (session, ("PROVE_S", "APPEAR_S")),
    )
    for module, names in times:
        for name in names:
            setattr(module, name, CALM_S)
    feeds.PATIENCE_S = CALM_S


def log_errors() -> None:
    """Shows in the guest's output what the node's log has, with its reasons."""
    handler = logging.StreamHandler()
    fields = {"error": "", "reason": ""}
    handler.setFormatter(logging.Formatter("%(threadName)s: %(message)s %(error)s%(reason)s", defaults=fields))
    logging.basicConfig(level=logging.DEBUG, handlers=[handler])


async def node_of(address: str, source: FolderSource) -> tuple[NodePeers, SegmentStore]:
    async def read_key() -> bytes:
        return KEY

    log_errors()
    be_patient()
    peers = NodePeers(node=NODES[address], epoch=EPOCH, read_key=read_key)
    segments = SegmentStore(
        source=source, memory_bytes=MEMORY_BYTES, workers_bytes=lambda: 0, threads=1, open_peer=peers.chunks
    )
    peers.open(address, None, segments, encrypted=False)
    return peers, segments


async def until(condition: Callable[[], bool], seen: Callable[[], object]) -> None:
    """`seen`: what the error says."""
    try:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise TimeoutError(str(seen())) from None


def hold(store: str, checkpoint: str, first_held: int, chunk_bytes: int, outcome: int) -> None:
    """Holds a checkpoint of which the chunks from `first_held` on come after SIGUSR1, which also cuts RDMA."""

    async def main() -> None:
        source = Halting(Path(store), first_held, chunk_bytes)
        peers, segments = await node_of(shared.HOLDER, source)

        def cut() -> None:
            assert peers.server is not None
            for connection in list(peers.server._connections):
                connection.end()
            source.is_open = True

        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, cut)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
        await segments.acquire(CheckpointId(checkpoint), OWNER)
        os.write(outcome, b"listening\n")
        os.write(outcome, json.dumps({"address": peers.address, "transports": peers.transports}).encode() + b"\n")
        await ended.wait()
        os.write(outcome, f"{peers.sent_bytes}\n".encode())

    asyncio.run(main())


def fetch(folder: Path, holder: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Fetches the checkpoint of the folder from the other guest; what came how."""
    about = json.loads((folder / "model.json").read_text())
    held = holder("hold_node", store=str(folder / "store"), **about)
    grant = Grant(
        checkpoint=CheckpointId(about["checkpoint"]),
        holder=NODES[shared.HOLDER],
        epoch=EPOCH,
        reader=NODES[shared.READER],
        expires_unix_ms=int(time.time() * 1000) + 10**7,
    )
    peer = Peer(
        node=grant.holder,
        address=held["address"],
        transports=tuple(held["transports"]),
        grant=grant,
        secret=grant_secret(grant, KEY),
        ranges=((0, 1 << 20),),
    )

    async def main() -> dict[str, Any]:
        source = Halting(folder / "store", 0, about["chunk_bytes"])
        peers, segments = await node_of(shared.READER, source)
        segment = await segments.acquire(grant.checkpoint, OWNER, None, Feed((peer,)))
        first_bytes = (about["first_held"] - 1) * about["chunk_bytes"]  # the store's one thread may hold one of them up
        await until(
            lambda: segments.fetched_bytes.get("peer", 0) >= first_bytes,
            lambda: (segments.fetched_bytes, _works(segment)),
        )
        holder("signal", pid=held["pid"], name="SIGUSR1")
        async with asyncio.timeout(LIMIT_S):
            await segment.filled.wait()
        assert peers.rdma is not None
        return {
            "transports": [held["transports"], peers.transports],
            "by_rdma_bytes": peers.rdma.received_bytes,
            "fetched": segments.fetched_bytes,
            "error": str(segment.error),
            "right": content(segment) == (folder / "store/checkpoints" / grant.checkpoint / "part").read_bytes()[4096:],
            "from_store_bytes": source.read_bytes,
        }

    found = asyncio.run(main())
    holder("signal", pid=held["pid"], name="SIGTERM")
    return {**found, "sent_bytes": holder("outcome", pid=held["pid"])["reason"]}


def _works(segment: Any) -> list[str]:
    """Each source of a fetch under way: what it has failed at, and what it is reading."""
    progress = segment.fetch.progress
    return [
        f"{work.source.source.name}: running {work.running}, strikes {work.strikes}, dropped {work.is_dropped}, "
        f"excluded {sorted(work.excluded)}, late {sorted(work.late)}, failures {dict(work.failures)}, reads "
        f"{sorted(chunk for chunk, run in progress._under_way.items() if run.source_index == index)}"
        for index, work in enumerate(progress._works)
    ]


def content(segment: Any) -> bytes:
    step = segment.manifest.chunk_bytes
    return b"".join(
        bytes(segment.region.view(at, min(step, segment.manifest.total_bytes - at)))
        for at in range(0, segment.manifest.total_bytes, step)
    )
