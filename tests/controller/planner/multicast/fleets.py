"""Requests for tests of the multicast planner."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st

from fleetstart.controller.planner.multicast import MulticastNode, MulticastPlan, MulticastRequest
from fleetstart.runtime.contract.ids import NodeId

MB = 1_000_000
patient = settings(deadline=None)
"""For what takes a while on a busy machine."""
RATE = 100 * MB


def nodes(count: int, sources: int = 1, *, chunks: int = 64, rate: float = RATE) -> list[MulticastNode]:
    """Equal nodes, the first of which have everything."""
    return [
        MulticastNode(
            node=NodeId(f"node-{number}"),
            up_bytes_per_s=rate,
            down_bytes_per_s=rate,
            held=((0, chunks),) if number < sources else (),
        )
        for number in range(count)
    ]


def request(
    members: Sequence[MulticastNode],
    *,
    blocks: int = 0,
    chunks: int = 64,
    store: float = 0.0,
    overhead_s: float = 0.0,
    at_once: bool = False,
) -> MulticastRequest:
    return MulticastRequest(
        nodes=tuple(members),
        size_bytes=chunks * 4 * MB,
        chunks=chunks,
        blocks=blocks,
        block_overhead_s=overhead_s,
        store_bytes_per_s=store,
        at_once=at_once,
    )


def received(plan: MulticastPlan) -> dict[NodeId, list[int]]:
    """Chunks that each receiver pulls, in order."""
    return {one.node: [chunk for pull in one.pulls for chunk in range(pull.first, pull.end)] for one in plan.receivers}


def from_store(plan: MulticastPlan) -> list[int]:
    """Chunks that are read from the store."""
    pulls = [pull for one in plan.receivers for pull in one.pulls if pull.peer < 0]
    return [chunk for pull in pulls for chunk in range(pull.first, pull.end)]


@st.composite
def held_masks(draw: st.DrawFn, count: int, blocks: int) -> list[int]:
    """Any ownership in which each block is somewhere."""
    masks = [draw(st.integers(0, (1 << blocks) - 1)) for _ in range(count)]
    for block in range(blocks):
        masks[draw(st.integers(0, count - 1))] |= 1 << block
    return masks
