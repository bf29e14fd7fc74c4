"""Starts of several workers by multicast: a candidate beside the group that `make_plan` finds, for as many new nodes as
workers are wanted.

Each node gets the whole model by its part of a multicast plan. Where several nodes have copies to begin with, those
that were sent different parts first serve together before they are whole, as execution pipelines (λScale section 4.3).
Nodes that one copy feeds serve once they are whole: the model has left it no sooner. The group, whose stages fetch
their own layers first, and the multicast are compared by the time until workers serve, and explained in one table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from fleetstart.runtime.contract.ids import NodeId, WorkerId
from fleetstart.runtime.contract.node.devices import DeviceShare, host_bytes

from ..checkpoint_layout import EVERY_LAYER
from ..cluster import Cluster
from ..latency_model import (
    StageTimes,
    StageWork,
    cost_gib_s,
    ready_overlapped_s,
    ready_sequential_s,
    tpot_s,
    ttft_s,
    work,
)
from ..links.contention import NEVER
from ..node_state import NodeState
from ..peers import PEERS_MOST, PeerSource
from ..plan import CandidateReport, PeerShare, Plan, PlanRequest, StagePlan
from ..search.node_filter import CandidateNode, NodeNeed, quickest_nodes
from ..selection import SIZE_USUAL, WORTH, make_plan
from .layer_pipelines import LayerPipeline, layer_pipelines
from .plan import MulticastPlan, ReceiverPlan
from .request import MulticastNode, MulticastRequest
from .selection import multicast_plans, plan_multicast

RECEIVERS_MOST = 8
"""Workers that one multicast starts: to plan more takes tens of milliseconds in the loop that serves calls."""


def plan_starts(request: PlanRequest, cluster: Cluster, now_s: float) -> Plan:
    """Plans a start: a group or a single worker, or several workers by multicast, if they are wanted and it is
    quicker."""
    group = make_plan(request, cluster, now_s)
    if request.missing < 2 or not request.chunks or not group.stages:
        return group
    multicast = _multicast(request, cluster, now_s)
    if multicast is None:
        return group
    one_by_one = one_by_one_s(request, cluster, group, len(multicast.serve_s), now_s)
    why_not = _why_not(multicast, group, one_by_one)
    if why_not:
        considered = [*group.considered, _report(multicast, why_not)]
        return msgspec.structs.replace(group, considered=considered)
    lost = _slower(one_by_one, multicast.serve_s)
    others = [msgspec.structs.replace(one, why_not=one.why_not or lost) for one in group.considered]
    return msgspec.structs.replace(multicast, considered=[*others, _report(multicast, "")])


def _why_not(multicast: Plan, group: Plan, one_by_one: Sequence[float]) -> str:
    """The reason for which the group is taken; empty if the multicast is, also if the group is not 15% quicker: whose
    starts read what the others receive is predicted as if that took no time."""
    if group.meets_slo and not multicast.meets_slo:
        return f"TTFT {multicast.ttft_s:.2f} s × {multicast.margin:.2f} is above the SLO"
    if (multicast.meets_slo and not group.meets_slo) or WORTH * sum(multicast.serve_s) <= sum(one_by_one):
        return ""
    return _slower(multicast.serve_s, one_by_one)


def _slower(times: Sequence[float], others: Sequence[float]) -> str:
    count = len(times)
    return f"{count} workers serve after {sum(times) / count:.2f} s on average, not {sum(others) / count:.2f} s"


def one_by_one_s(request: PlanRequest, cluster: Cluster, group: Plan, count: int, now_s: float) -> list[float]:
    """When so many workers serve that are started as this group and more like it after it, as far as there is room.
    The cluster is as before afterwards."""
    before: dict[NodeId, NodeState] = {}
    found: list[float] = []
    plan = group
    try:
        while plan.stages:
            whole = min(count - len(found), max(1, sum(stage.full for stage in plan.stages)))
            found += [plan.ttft_s, *[plan.ttft_s + plan.whole_s] * (whole - 1)]
            if len(found) >= count:
                return found
            for number, stage in enumerate(plan.stages):
                for node in (stage.node, *(share.node for share in stage.peers)):
                    before.setdefault(node, cluster[node])
                worker = WorkerId(f"{len(found)}-{number}")
                cluster.order(stage, worker, request.checkpoint, now_s, request.trees)
            left = count - len(found)
            plan = make_plan(replace(request, workers=min(left, SIZE_USUAL), missing=left), cluster, now_s)
    finally:
        for state in before.values():
            cluster.put(state)
    return [*found, *[NEVER] * (count - len(found))]


def _multicast(request: PlanRequest, cluster: Cluster, now_s: float) -> Plan | None:
    """The start by multicast; None if there are no copies to begin with, or fewer than two nodes for it."""
    wanted = min(request.missing, RECEIVERS_MOST)
    peers = [peer for peer in cluster.peers(request.checkpoint, now_s) if _is_copy(cluster[peer.node], request)]
    sources = [peer for peer in peers if not peer.promised][:PEERS_MOST]
    if not sources:
        return None
    new = _new_nodes(request, cluster, sources, wanted, now_s)
    if len(new) < 2:
        return None
    nodes = [_sender(peer, request, cluster[peer.node].leaf) for peer in sources] + [_receiver(node) for node in new]
    wanted_of = MulticastRequest(
        nodes=tuple(nodes),
        size_bytes=request.segment_bytes,
        chunks=request.chunks,
        first_chunks=tuple(request.layout.ends_chunks),
    )
    ways = [plan_multicast(wanted_of)] if len(sources) == 1 else multicast_plans(wanted_of)
    plans = [plan for way in ways if (plan := _planned(request, way, new)) is not None]
    return min(plans, key=lambda plan: sum(plan.serve_s), default=None)


def _is_copy(state: NodeState, request: PlanRequest) -> bool:
    """True if the node has all layers in its memory, and does not only receive them."""
    held = state.held.get(request.checkpoint) if request.checkpoint is not None else None
    return held is not None and held.host == EVERY_LAYER


def _planned(request: PlanRequest, found: MulticastPlan, new: Sequence[CandidateNode]) -> Plan | None:
    by_node = {one.node: one for one in found.receivers}
    if not found.name or len(by_node) < len(new):
        return None
    parts = [(node, by_node[node.state.node]) for node in new]
    return _plan(request, found, parts, _pipelines(found, request, [node.state.node for node in new]))


def _pipelines(found: MulticastPlan, request: PlanRequest, nodes: Sequence[NodeId]) -> list[LayerPipeline]:
    """The execution pipelines, whose nodes are known by their places in `nodes`."""
    places = [nodes.index(receiver.node) for receiver in found.receivers]
    return [
        LayerPipeline(tuple(stage._replace(node=places[stage.node]) for stage in pipeline.stages), pipeline.ready_s)
        for pipeline in layer_pipelines(found, request.layout)
    ]


def _new_nodes(
    request: PlanRequest, cluster: Cluster, sources: list[PeerSource], wanted: int, now_s: float
) -> list[CandidateNode]:
    """The fastest nodes of the sources' region with room for a whole worker that serve chunks, have none of these and
    reach the sources."""
    need_bytes, fetch_bytes = request.memory_bytes + request.segment_bytes, request.segment_bytes
    seen = wanted + len(sources)
    need = NodeNeed(need_bytes, request.memory_bytes, request.device_bytes(request.layout.whole))
    region, regions = sources[0].region, request.wanted.regions
    if regions and region not in regions:
        return []
    here = replace(request, wanted=request.wanted._replace(regions=(region,)))
    snapshots, _ = quickest_nodes(here, cluster, [need], (fetch_bytes, fetch_bytes), seen, now_s)
    machines = {source.machine for source in sources} - {""}
    nodes = [
        CandidateNode(snapshot, request, now_s)
        for snapshot in snapshots
        if snapshot.state.up is not None
        and machines <= {snapshot.state.machine}
        and (not snapshot.state.peers_on or machines)
    ]
    free = [
        node for node in nodes if node.fits_whole and (node.held is None or not (node.held.host | node.held.coming))
    ]
    return sorted(free, key=lambda node: (node.shared, node.ratio, node.state.node))[:wanted]


def _sender(peer: PeerSource, request: PlanRequest, leaf: str) -> MulticastNode:
    """A node with a copy. If others read from it already, it is a source only where no other one is free."""
    return MulticastNode(
        node=peer.node,
        up_bytes_per_s=peer.bytes_per_s,
        down_bytes_per_s=peer.bytes_per_s,
        held=((0, request.chunks),),
        receives=False,
        busy_sending=bool(peer.up.fetches),
        leaf=leaf,
    )


def _receiver(node: CandidateNode) -> MulticastNode:
    state, link = node.state, node.link
    up = state.up.bytes_per_s if state.up is not None else 0.0
    down = state.down_bytes_per_s / (len(link.fetches) + 1)
    return MulticastNode(node=state.node, up_bytes_per_s=up, down_bytes_per_s=down, leaf=state.leaf)


def _times(request: PlanRequest, node: CandidateNode, fetch_s: float, share: float = 1.0) -> StageTimes:
    """The start of a node of which that share of the model has come after `fetch_s`."""
    return StageTimes(
        start_s=max(node.state.start_s, node.files_s),
        library_s=request.measures.library_s.value,
        fetch_s=fetch_s,
        load_s=share * request.segment_bytes / node.load_bytes_per_s(_shares(request, node)),
    )


def _work(request: PlanRequest, node: CandidateNode, share: float = 1.0) -> StageWork:
    return StageWork(share, own=True, slowness=node.slowness(_shares(request, node)))


def _serve_s(
    request: PlanRequest, parts: Sequence[tuple[CandidateNode, ReceiverPlan]], pipelines: Sequence[LayerPipeline]
) -> list[float]:
    """When each worker serves, in rising order: a whole one, or a pipeline instead of its first member to be whole."""
    measures = request.measures

    def first_s(times: Sequence[StageTimes], stages: Sequence[StageWork]) -> float:
        ready_s = ready_overlapped_s(times) + measures.rest_s.value
        return ttft_s(
            ready_s,
            prefill_s=measures.prefill_s.value,
            hop_s=measures.hop_s.value,
            stages=len(times),
            work=work(stages),
        )

    whole_s = [first_s([_times(request, node, part.last_s)], [_work(request, node)]) for node, part in parts]
    for pipeline in pipelines:
        members = [stage.node for stage in pipeline.stages]
        times = [
            _times(request, parts[stage.node][0], pipeline.ready_s, (stage.end - stage.first) / request.layout.count)
            for stage in pipeline.stages
        ]
        first = min(members, key=lambda member: whole_s[member])
        stages = [
            _work(request, parts[stage.node][0], (stage.end - stage.first) / request.layout.count)
            for stage in pipeline.stages
        ]
        whole_s[first] = min(whole_s[first], first_s(times, stages))
    return sorted(whole_s)


def _plan(
    request: PlanRequest,
    found: MulticastPlan,
    parts: list[tuple[CandidateNode, ReceiverPlan]],
    pipelines: Sequence[LayerPipeline],
) -> Plan:
    measures = request.measures
    serve_s = _serve_s(request, parts, pipelines)
    first_s, last_s = serve_s[0], serve_s[-1]
    layers = {stage.node: (stage.first, stage.end) for pipeline in pipelines for stage in pipeline.stages}
    sequential_s = min(ready_sequential_s([_times(request, node, part.last_s)]) for node, part in parts)
    reserved_bytes = sum(_reserved_bytes(request, node) for node, _ in parts)
    slo, margin = request.slo, request.margins.group
    slowest = max(work([_work(request, node)]) for node, _ in parts)
    token_s = tpot_s(decode_s=measures.decode_s.value, hop_s=0.0, stages=1, work=slowest)
    return Plan(
        stages=[
            _stage(request, node, part, layers.get(place, (0, request.layout.count)))
            for place, (node, part) in enumerate(parts)
        ],
        pipelines=[[stage.node for stage in pipeline.stages] for pipeline in pipelines],
        serve_s=serve_s,
        together=False,
        multicast=found.name,
        ways=list(found.considered),
        regions=list(request.wanted.regions),
        isolation=request.wanted.isolation,
        ttft_s=first_s,
        margin=margin,
        sequential_ttft_s=sequential_s + measures.rest_s.value + measures.prefill_s.value,
        ready_s=first_s - measures.prefill_s.value,
        tpot_s=token_s,
        cost_gib_s=cost_gib_s(reserved_bytes, first_s, last_s - first_s),
        whole_s=last_s - first_s,
        meets_slo=slo is None
        or (
            (slo.ttft_s is None or first_s * margin + request.waited_s <= slo.ttft_s)
            and (slo.tpot_s is None or token_s <= slo.tpot_s)
        ),
        reason=_reason(found, len(parts), pipelines),
    )


def _shares(request: PlanRequest, node: CandidateNode) -> tuple[DeviceShare, ...]:
    return node.shares(request.device_bytes(request.layout.whole)) or ()


def _reserved_bytes(request: PlanRequest, node: CandidateNode) -> int:
    return host_bytes(request.memory_bytes, _shares(request, node)) + node.missing_bytes


def _reason(found: MulticastPlan, nodes: int, pipelines: Sequence[LayerPipeline]) -> str:
    whole = f"a multicast to {nodes} nodes, {found.name}: the last is whole after {found.seconds:.2f} s"
    if found.pruned:
        whole += f"; {', '.join(found.pruned)} sends to others already, and is left out"
    sizes = " and ".join(str(len(pipeline.stages)) for pipeline in pipelines)
    first_s = min((pipeline.ready_s for pipeline in pipelines), default=0.0)
    return f"{whole}; until then they are pipelines of {sizes}, the first after {first_s:.2f} s" if pipelines else whole


def _stage(request: PlanRequest, node: CandidateNode, part: ReceiverPlan, layers: tuple[int, int]) -> StagePlan:
    """A whole worker, with its part of the multicast, and the layers that it serves before it is whole."""
    pulled: dict[NodeId, int] = dict.fromkeys(part.peers, 0)
    for pull in part.pulls:
        pulled[part.peers[pull.peer]] += pull.end - pull.first
    chunk_bytes = request.segment_bytes / request.chunks
    return StagePlan(
        node=node.state.node,
        region=node.state.region,
        epoch=node.state.epoch,
        first=layers[0],
        end=layers[1],
        full=True,
        memory_bytes=request.memory_bytes,
        reserved_bytes=_reserved_bytes(request, node),
        devices=_shares(request, node),
        missing_bytes=node.missing_bytes,
        store_bytes=0,
        peers=[PeerShare(peer, round(chunks * chunk_bytes)) for peer, chunks in pulled.items()],
        pulls=list(part.pulls),
        files_bytes=node.files_bytes,
        fetch_s=max(part.last_s, node.files_s),
    )


def _report(plan: Plan, why_not: str) -> CandidateReport:
    missing_bytes = sum(stage.missing_bytes for stage in plan.stages)
    return CandidateReport(
        kind="multicast",
        stages=1,
        full=len(plan.stages),
        nodes=[stage.node for stage in plan.stages],
        missing_bytes=missing_bytes,
        peer_bytes=missing_bytes,
        ttft_s=plan.ttft_s,
        margin=plan.margin,
        tpot_s=plan.tpot_s,
        cost_gib_s=plan.cost_gib_s,
        why_not=why_not,
    )
