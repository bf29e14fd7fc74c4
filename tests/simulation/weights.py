"""Weights of simulated nodes: segments that fill after a while, copies that are ordered, and keys of grants.

Bytes do not move. What is simulated is what controllers decide from: which node says that it has what, and when.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from typing import Any

import msgspec

from fleetstart.controller.peers.pool import MadePeerKey
from fleetstart.controller.state.access_records import SecretRecord
from fleetstart.controller.state.identity_records import PeerKeyRecord
from fleetstart.controller.state.view import View
from fleetstart.prefetcher.control.redis_state import REDIS_ERRORS
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.ids import CheckpointId, NodeId, WorkerId
from fleetstart.runtime.contract.node.peers import CopyOrder, SealedPeerKey
from fleetstart.runtime.contract.node.reports import NodeReport, SegmentReport
from fleetstart.runtime.contract.node.sealed_secrets import Sealed
from fleetstart.runtime.contract.weights.manifest import Manifest, Part, TensorEntry, checkpoint_id, manifest_bytes
from tests.simulation.processes import Process

CHUNK_BYTES = 4096
MANIFEST = Manifest(
    chunk_bytes=CHUNK_BYTES,
    total_bytes=4 * CHUNK_BYTES,
    parts=[Part("part-0", 64, 4 * CHUNK_BYTES, 0)],
    chunks=[1, 2, 3, 4],
    tensors={"w": TensorEntry(0, 4 * CHUNK_BYTES, "U8", (4 * CHUNK_BYTES,), 0)},
)
CHECKPOINT = checkpoint_id(manifest_bytes(MANIFEST))
OBJECTS = {
    f"checkpoints/{CHECKPOINT}/manifest.json": manifest_bytes(MANIFEST),
    f"checkpoints/{CHECKPOINT}/part-0": bytes(64 + 4 * CHUNK_BYTES),
}
READ_S = 1.0

_COPIES = msgspec.json.Decoder(CopyOrder)


class SimulatedPeerKeys:
    """Keys that follow from the node's start: real ones are random, and a seed is a run."""

    def __init__(self, view: View) -> None:
        self._view = view

    def key(self, node: NodeId, epoch: str) -> bytes | None:
        record = self._view.peer_keys.get(node)
        return hashlib.sha256(f"{node} {epoch}".encode()).digest() if record and record.epoch == epoch else None

    def make(self, report: NodeReport) -> MadePeerKey:
        secret = SecretRecord(
            name="key", project="", box="", master="", size_bytes=0, created_unix_ms=0, updated_unix_ms=0, updated_by=""
        )
        record = PeerKeyRecord(node=report.node, epoch=report.epoch, key=secret)
        return MadePeerKey(record, SealedPeerKey(epoch=report.epoch, sealed=Sealed()))


class NodeWeights:
    """The segments of one start of a node's daemon."""

    def __init__(self, world: Any, process: Process, client: Any, node: NodeId, epoch: str) -> None:
        self._world = world
        self._process = process
        self._client = client
        self._node = node
        self._epoch = epoch
        self._pins: dict[CheckpointId, set[str]] = {}
        self._ready: set[CheckpointId] = set()

    def pin(self, checkpoint: CheckpointId, by: WorkerId | str) -> None:
        """Holds the checkpoint for a worker or a copy; the first one has it fetched."""
        pins = self._pins.setdefault(checkpoint, set())
        if not pins and checkpoint not in self._ready:
            asyncio.get_running_loop().call_later(
                self._world.chance.uniform(0.05, 1.5), lambda: self._ready.add(checkpoint)
            )
        pins.add(by)

    def unpin(self, checkpoint: CheckpointId, by: WorkerId | str) -> None:
        """Lets go of it. Memory is short here: what nobody holds is evicted."""
        pins = self._pins.get(checkpoint, set())
        pins.discard(by)
        if not pins:
            self._pins.pop(checkpoint, None)
            self._ready.discard(checkpoint)

    def reports(self) -> list[SegmentReport]:
        size_bytes = MANIFEST.total_bytes
        return [
            SegmentReport(checkpoint, "ready", size_bytes, size_bytes, [(0, len(MANIFEST.chunks))])
            if checkpoint in self._ready
            else SegmentReport(checkpoint, "filling", size_bytes, 0)
            for checkpoint in self._pins
        ]

    async def follow_copies(self) -> None:
        """Holds what is ordered, and no more, until cancelled."""
        held: set[CheckpointId] = set()
        while True:
            with contextlib.suppress(*REDIS_ERRORS):
                raw = await self._client.hgetall(keys.copies(self._node))
                orders = [_COPIES.decode(value) for value in raw.values()]
                wanted = {order.checkpoint for order in orders if order.epoch == self._epoch}
                for checkpoint in sorted(wanted - held):
                    self.pin(checkpoint, "copy")
                for checkpoint in sorted(held - wanted):
                    self.unpin(checkpoint, "copy")
                held = wanted
            await asyncio.sleep(READ_S)


def copies_of(world: Any) -> list[CopyOrder]:
    """The orders of copies that Redis has."""
    data = world.server.data.values
    raw = [value for node in world.nodes for value in data.get(keys.copies(NodeId(node)).encode(), {}).values()]
    return [_COPIES.decode(value) for value in raw]
