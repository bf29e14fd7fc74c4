"""Selection of a multicast plan: the candidate with the shortest predicted time, with reasons for `fs explain`.

The time is that until the last receiver is whole. Candidates within `TIE` of the shortest are compared by the mean time
of the receivers instead, since a node that is whole serves alone: behind a slow link all ways take as long.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fleetstart.runtime.contract.ids import NodeId
from fleetstart.runtime.contract.node.peers import Pull

from .block_count import BlockCost, elbow
from .candidates import MulticastWay, Situation, candidates, situation
from .execution_pipelines import execution_pipelines
from .plan import (
    MulticastCandidate,
    MulticastPlan,
    PipelinePlan,
    PipelineStage,
    ReceiverPlan,
)
from .request import MulticastRequest, missing_ranges
from .schedule import STORE, Transfer

TIE = 1.02
"""Predictions nearer to each other than this are the same: measured rates differ by more."""


def plan_multicast(request: MulticastRequest) -> MulticastPlan:
    """The plan, first or replanned, by which all receivers are whole soonest."""
    return next(multicast_plans(request))


def multicast_plans(request: MulticastRequest) -> Iterator[MulticastPlan]:
    """A plan for each way to send, the one of `plan_multicast` first; one plan in any case."""
    found = situation(request, request.blocks or _block_count(request))
    unreachable = 0 if found.has_store else found.lost
    if unreachable:
        found = _without(found, unreachable)
    considered = sorted(candidates(found), key=lambda one: one.seconds) if found.receivers else []
    if not considered:
        yield _nothing(found, unreachable)
        return
    shortest_s = considered[0].seconds
    best = min((one for one in considered if one.seconds <= shortest_s * TIE), key=lambda one: one.mean_s)
    for way in (best, *(one for one in considered if one is not best)):
        yield _plan(found, way, considered, unreachable)


def _block_count(request: MulticastRequest) -> int:
    """At the elbow, for the links' median rate."""
    rates = sorted(min(node.up_bytes_per_s, node.down_bytes_per_s) for node in request.nodes)
    cost = BlockCost(rates[len(rates) // 2] if rates else 1.0, request.block_overhead_s)
    return elbow(request.size_bytes, cost, max(2, len(request.nodes)), request.chunks)


def _without(found: Situation, blocks: int) -> Situation:
    """The situation as if every node had those blocks, so that nobody is to receive them."""
    held = [mask | blocks for mask in found.held]
    everything = (1 << len(found.blocks)) - 1
    receivers = [receiver for receiver in found.receivers if held[receiver] != everything]
    return replace(found, held=held, receivers=receivers)


def _plan(
    found: Situation, chosen: MulticastWay, considered: Sequence[MulticastWay], unreachable: int
) -> MulticastPlan:
    nodes = found.request.nodes
    transfers: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in chosen.schedule:
        transfers[transfer.receiver].append(transfer)
    have: list[dict[int, float]] = [
        {block: 0.0 for block in range(len(found.blocks)) if mask >> block & 1} | arrived
        for mask, arrived in zip(found.held, chosen.arrivals, strict=True)
    ]
    pipelines = [] if unreachable else execution_pipelines(chosen.groups, have, len(found.blocks))
    return MulticastPlan(
        name=chosen.name,
        receivers=tuple(_receiver(found, n, transfers[n], chosen.arrivals[n]) for n in found.receivers),
        pipelines=tuple(
            PipelinePlan(
                stages=tuple(
                    PipelineStage(nodes[node].node, *_chunks(found, first, end)) for node, first, end in pipeline.stages
                ),
                ready_s=pipeline.ready_s,
            )
            for pipeline in pipelines
        ),
        blocks=tuple(found.blocks),
        seconds=chosen.seconds,
        mean_s=chosen.mean_s,
        reason=_reason(chosen, considered),
        considered=tuple(_report(one, chosen) for one in considered),
        pruned=tuple(nodes[number].node for number in found.pruned),
        unreachable=_ranges(found, unreachable),
    )


def _receiver(found: Situation, number: int, transfers: Sequence[Transfer], arrived: dict[int, float]) -> ReceiverPlan:
    node = found.request.nodes[number]
    peers: dict[int, int] = {}
    pulls, arrivals = [], []
    for _, sender, _, block in transfers:
        place = -1 if sender == STORE else peers.setdefault(sender, len(peers))
        for first, end in missing_ranges(*found.blocks[block], node.held):
            pulls.append(Pull(place, first, end))
            arrivals.append(arrived[block])
    names: list[NodeId] = [found.request.nodes[sender].node for sender in peers]
    return ReceiverPlan(node=node.node, peers=tuple(names), pulls=tuple(pulls), arrivals_s=tuple(arrivals))


def _chunks(found: Situation, first: int, end: int) -> tuple[int, int]:
    """Blocks first .. end - 1 in chunks."""
    if first == end:
        return found.request.chunks, found.request.chunks
    return found.blocks[first][0], found.blocks[end - 1][1]


def _ranges(found: Situation, blocks: int) -> tuple[tuple[int, int], ...]:
    return tuple(chunks for number, chunks in enumerate(found.blocks) if blocks >> number & 1)


def _nothing(found: Situation, unreachable: int) -> MulticastPlan:
    return MulticastPlan(
        name="",
        receivers=(),
        pipelines=(),
        blocks=tuple(found.blocks),
        seconds=0.0,
        mean_s=0.0,
        reason="no node lacks chunks that another one holds" if unreachable else "every node has all chunks",
        considered=(),
        unreachable=_ranges(found, unreachable),
    )


def _reason(chosen: MulticastWay, considered: Sequence[MulticastWay]) -> str:
    others = [one for one in considered if one is not chosen]
    if not others:
        return f"{chosen.name}: the only way"
    other, whole = others[0], f"{chosen.name}: all are whole after {chosen.seconds:.2f} s"
    if other.seconds * TIE < chosen.seconds:
        return f"{whole}, and serve sooner than by {other.name}, which takes {other.seconds:.2f} s"
    if other.seconds <= chosen.seconds * TIE:
        return f"{whole}, as by {other.name}; the mean is {chosen.mean_s:.2f} s, not {other.mean_s:.2f} s"
    return f"{whole}, by {other.name} after {other.seconds:.2f} s"


def _report(one: MulticastWay, chosen: MulticastWay) -> MulticastCandidate:
    return MulticastCandidate(
        name=one.name, seconds=one.seconds, mean_s=one.mean_s, steps=one.steps, why_not=_why_not(one, chosen)
    )


def _why_not(one: MulticastWay, chosen: MulticastWay) -> str:
    if one is chosen:
        return ""
    if one.seconds * TIE < chosen.seconds:
        return f"all are whole sooner, after {one.seconds:.2f} s, but do not serve sooner"
    if one.seconds <= chosen.seconds * TIE:
        return f"as quick: receivers are whole after {one.mean_s:.2f} s on average, against {chosen.mean_s:.2f} s"
    return f"slower: {one.seconds:.2f} s against {chosen.seconds:.2f} s"
