"""What holds of every plan, whatever the nodes and whatever is asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.planner.cluster import Cluster, NodeSnapshot
from fleetstart.controller.planner.plan import PlanRequest
from fleetstart.controller.planner.search.candidates import Candidate, Search
from fleetstart.controller.planner.search.node_filter import CandidateNode, find_candidate_nodes
from fleetstart.controller.planner.selection import make_plan
from fleetstart.runtime.contract.function.spec import SLO
from tests.controller.planner.worlds import CHAT, MB, clusters, late_ones, names, request, taken

slos = st.none() | st.builds(
    SLO, ttft_s=st.sampled_from([0.3, 1.0, 2.0, 5.0, 20.0]), tpot_s=st.sampled_from([None, 0.06, 0.12])
)
requests = st.builds(
    lambda layers, slo, workers, kv: request(layers=layers, slo=slo, workers=workers, kv_bytes=kv * MB),
    st.integers(1, 9), slos, st.integers(1, 5), st.sampled_from([0, 80]),
)  # fmt: skip


@given(clusters(), requests)
def test_a_plan_tiles_the_layers_on_nodes_that_have_room(cluster: Cluster, wanted: PlanRequest) -> None:
    found = make_plan(wanted, cluster, 0.0)
    if not found.stages:
        assert found.error is not None
        return
    assert [stage.first for stage in found.stages] == [0, *(stage.end for stage in found.stages[:-1])]
    assert found.stages[-1].end == wanted.layout.count
    assert len(set(names(found))) == len(found.stages), "one stage a node"
    assert all(stage.reserved_bytes <= cluster[stage.node].free_bytes for stage in found.stages)
    assert [one.why_not for one in found.considered].count("") == 1
    if wanted.slo is not None and found.meets_slo:
        assert found.ttft_s <= (wanted.slo.ttft_s or 1e9)
        assert found.tpot_s <= (wanted.slo.tpot_s or 1e9)
    elif wanted.slo is not None:
        assert all(stage.fetch_within_s is None for stage in found.stages)


@given(clusters(), requests)
def test_only_what_no_candidate_keeps_is_given_up(cluster: Cluster, wanted: PlanRequest) -> None:
    found = make_plan(wanted, cluster, 0.0)
    if wanted.slo is None or found.meets_slo or not found.stages:
        return
    sizes = range(1, min(8, wanted.layout.count) + 1)
    for one in every_candidate(wanted, cluster, list(sizes)):
        assert one.ttft_s > (wanted.slo.ttft_s or 1e9) or one.tpot_s > (wanted.slo.tpot_s or 1e9)


@pytest.mark.slow
@given(clusters(holding=False), requests, st.integers(0, 6), st.integers(2, 4))
def test_more_bandwidth_never_predicts_a_longer_first_token(
    cluster: Cluster, wanted: PlanRequest, which: int, times: int
) -> None:
    """Of each way to start, and so of the quickest. Which of layers that lie about are used is a matter of greed, and
    so is whether a quicker link is taken although others are at its device."""
    cluster = Cluster(replace(state, workers=0) for state in cluster)
    states = list(cluster)
    slow = states[which % len(states)]
    quick = replace(slow, link=replace(slow.link, bytes_per_s=slow.link.bytes_per_s * times))
    sizes = list(range(1, min(4, wanted.layout.count) + 1))
    before = best_by_way(wanted, cluster, sizes)
    after = best_by_way(wanted, Cluster([quick if state is slow else state for state in states]), sizes)
    assert before.keys() == after.keys()
    assert all(after[way] <= before[way] * (1 + 1e-9) for way in before)


@given(clusters(1, 5), st.lists(st.tuples(requests, st.floats(0, 2)), min_size=1, max_size=6))
def test_no_promise_is_broken_and_no_memory_given_twice(
    cluster: Cluster, arrivals: list[tuple[PlanRequest, float]]
) -> None:
    now_s = 0.0
    for index, (one, wait_s) in enumerate(arrivals):
        now_s += wait_s
        wanted = replace(one, checkpoint=type(CHAT)(f"{index}")) if index % 2 else one
        taken(make_plan(wanted, cluster, now_s), cluster, wanted, now_s, f"{index}.")
        for state in cluster:
            assert state.free_bytes >= 0
            assert not late_ones(state.link, now_s)


@given(clusters(1, 12), requests)
def test_looking_at_a_few_nodes_finds_what_looking_at_all_finds(cluster: Cluster, wanted: PlanRequest) -> None:
    sizes = list(range(1, min(4, wanted.layout.count) + 1))
    nodes, _ = find_candidate_nodes(wanted, cluster, sizes, 0.0)
    few = [one for one in Search(wanted, nodes, 0.0).candidates(sizes) if isinstance(one, Candidate)]
    every = every_candidate(wanted, cluster, sizes)
    assert [(len(one.cuts), one.full, [node.state.node for node in one.nodes]) for one in few] == [
        (len(one.cuts), one.full, [node.state.node for node in one.nodes]) for one in every
    ]


@given(clusters(), requests)
def test_the_same_world_gives_the_same_plan_whatever_its_order(cluster: Cluster, wanted: PlanRequest) -> None:
    backwards = Cluster(reversed(list(cluster)))
    assert make_plan(wanted, cluster, 0.0) == make_plan(wanted, backwards, 0.0)


def every_candidate(wanted: PlanRequest, cluster: Cluster, sizes: list[int]) -> list[Candidate]:
    nodes = [CandidateNode(NodeSnapshot(state, state.link), wanted, 0.0) for state in cluster]
    nodes.sort(key=lambda node: (node.ratio, node.state.node))
    return [one for one in Search(wanted, nodes, 0.0).candidates(sizes) if isinstance(one, Candidate)]


def best_by_way(wanted: PlanRequest, cluster: Cluster, sizes: list[int]) -> dict[tuple[int, int], float]:
    best: dict[tuple[int, int], float] = {}
    for one in every_candidate(wanted, cluster, sizes):
        way = (len(one.cuts), one.full)
        best[way] = min(one.ttft_s, best.get(way, float("inf")))
    return best
