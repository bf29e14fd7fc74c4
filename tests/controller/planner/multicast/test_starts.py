"""Several workers that are started by multicast: when it is taken, what each node reads, and what the plan says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetstart.controller.planner.accuracy_report import ObservedStart, explain, format_explanation
from fleetstart.controller.planner.checkpoint_layout import EVERY_LAYER, CheckpointLayout
from fleetstart.controller.planner.cluster import Cluster
from fleetstart.controller.planner.constraints import PlacementConstraints
from fleetstart.controller.planner.links.contention import PendingFetch
from fleetstart.controller.planner.multicast.starts import RECEIVERS_MOST, one_by_one_s, plan_starts
from fleetstart.controller.planner.node_state import HeldLayers, NodeState, uplink
from fleetstart.controller.planner.plan import Plan, PlanRequest
from fleetstart.runtime.contract.function.spec import SLO
from fleetstart.runtime.contract.ids import CheckpointId, WorkerId
from fleetstart.runtime.contract.weights.stage import LayerLayout
from tests.controller.planner.worlds import CHAT, MB, clusters, measured, names, node, request, taken


def burst(count: int, **fields: Any) -> PlanRequest:
    """Of a model in 100 chunks, for so many whole workers."""
    fields = {"measures": measured(prefill_s=0.0), "chunks": 100, **fields}
    return request(workers=min(4, count), missing=count, most=16, **fields)


def new(count: int, **fields: Any) -> list[NodeState]:
    """Nodes whose store is slow, and whose network is not."""
    fields = {"bytes_per_s": 10.0 * MB, "peer_bytes_per_s": 100.0 * MB, "up": 100.0 * MB, **fields}
    return [node(f"n{index}", **fields) for index in range(count)]


def holder(name: str = "has", **fields: Any) -> NodeState:
    fields = {"up": 100.0 * MB, "holds": HeldLayers(host=EVERY_LAYER), "free_bytes": 0, **fields}
    return node(name, **fields)


def planned(nodes: list[NodeState], wanted: PlanRequest) -> Plan:
    return plan_starts(wanted, Cluster(nodes), 0.0)


def test_a_burst_behind_one_copy_is_a_multicast() -> None:
    found = planned([*new(4), holder()], burst(4))
    assert found.multicast
    assert not found.together
    assert sorted(names(found)) == ["n0", "n1", "n2", "n3"]
    assert found.ttft_s + found.whole_s < 4.0 * 1.25, "400 MB over one uplink take 4 s, and each new node sends, too"
    for stage in found.stages:
        assert stage.full
        assert stage.store_bytes == 0
        assert stage.peer_bytes == pytest.approx(400 * MB, abs=100)
        assert sorted(chunk for pull in stage.pulls for chunk in range(pull.first, pull.end)) == list(range(100))
        assert all(0 <= pull.peer < len(stage.peers) for pull in stage.pulls)


def test_a_node_that_receives_the_model_is_no_copy_to_begin_with() -> None:
    """A worker that was ordered a moment ago: its node has nothing yet, whatever its link is predicted to take."""
    gets = holder("gets", holds=HeldLayers(coming=EVERY_LAYER), bytes_per_s=10.0 * MB)
    fetches = replace(gets, link=replace(gets.link, fetches=(PendingFetch(WorkerId("w"), CHAT, 400.0 * MB),)))
    for coming in (gets, fetches):
        assert not planned([*new(4), coming], burst(4)).multicast


def test_one_table_has_the_group_and_the_multicast() -> None:
    for nodes, taken_kind in ((new(4), "multicast"), (new(4, bytes_per_s=400.0 * MB), "start")):
        found = planned([*nodes, holder()], burst(4))
        kinds = {one.kind: one.why_not for one in found.considered}
        assert set(kinds) == {"start", "multicast"}
        assert [one.kind for one in found.considered if not one.why_not] == [taken_kind]
        text = format_explanation(explain(found, ObservedStart()))
        assert "multicast" in text
        assert "peers" in text
        ways = {one.name: one.why_not for one in found.ways}
        assert ("multicast by" in text) == bool(ways) == (taken_kind == "multicast")
        assert all(name in text and why_not in text for name, why_not in ways.items())
        assert [name for name, why_not in ways.items() if not why_not] == [found.multicast] * bool(ways)


def test_workers_without_layers_are_compared_as_many_with_as_many() -> None:
    """Of single workers each is as quick as the first of a multicast; all of them together are not."""
    found = planned([*new(3), holder()], burst(3, layout=request(1, 400 * MB).layout))
    assert found.multicast
    assert len(found.stages) == len(found.serve_s) == 3
    roomy = planned([*new(3), holder(free_bytes=1000 * MB)], burst(3, layout=request(1, 400 * MB).layout))
    assert names(roomy) == ["has"], "a worker that fetches nothing comes first"


@settings(deadline=None)
@given(clusters(least=2), st.integers(2, 6))
def test_starts_one_by_one_are_as_many_as_are_asked_for_and_change_no_cluster(cluster: Cluster, count: int) -> None:
    wanted = burst(count)
    before = {state.node: state for state in cluster}
    group = plan_starts(wanted, cluster, 0.0)
    if not group.stages or not group.together:
        return
    times = one_by_one_s(wanted, cluster, group, count, 0.0)
    assert len(times) == count
    assert times[0] == group.ttft_s
    assert {state.node: state for state in cluster} == before


def in_chunks(ends: int, layers: int) -> CheckpointLayout:
    """100 chunks of 4 MB: half of the ends, the layers, the other half."""
    each = (100 - ends) // layers
    first = ends // 2
    chunks = [(first + layer * each, first + (layer + 1) * each) for layer in range(layers)]
    behind = chunks[-1][1]
    rest = 100 - layers * each
    layout = LayerLayout(rest * 4 * MB, [each * 4 * MB] * layers, chunks, [(0, first), (behind, 100)])
    return CheckpointLayout(layout)


def test_nodes_that_are_fed_by_several_copies_serve_together_before_one_is_whole() -> None:
    found = planned([*new(4), holder("has0"), holder("has1")], burst(4, layout=in_chunks(20, 8)))
    assert found.multicast
    assert [len(pipeline) for pipeline in found.pipelines] == [2, 2]
    assert found.serve_s[0] < 0.7 * found.serve_s[-1], "after about half of the time"
    assert len(found.serve_s) == 4
    assert "pipelines of 2 and 2" in found.reason
    assert "pipelines of 2 and 2" in format_explanation(explain(found, ObservedStart()))


def test_a_copy_that_others_read_already_is_left_out_where_another_is_free() -> None:
    reading = PendingFetch(WorkerId("w"), CHAT, 50.0 * MB)
    busy = replace(holder("has1"), up=uplink(100.0 * MB, (), (reading,), 0.0))
    found = planned([*new(3), holder("has0"), busy], burst(3))
    assert {share.node for stage in found.stages for share in stage.peers} & {"has0", "has1"} == {"has0"}
    assert "has1 sends to others already" in found.reason
    alone = planned([*new(3), busy], burst(3))
    assert "has1" in {share.node for stage in alone.stages for share in stage.peers}


@settings(deadline=None)
@given(st.lists(st.sampled_from("ab"), min_size=4, max_size=4))
def test_new_nodes_read_from_the_copy_behind_their_own_switch(leaves: list[str]) -> None:
    nodes = [replace(one, leaf=leaf) for one, leaf in zip(new(4), leaves, strict=True)]
    found = planned([*nodes, replace(holder("a0"), leaf="a"), replace(holder("b0"), leaf="b")], burst(4))
    leaf_of = {f"n{index}": leaf for index, leaf in enumerate(leaves)} | {"a0": "a", "b0": "b"}
    crossings = sum(leaf_of[stage.node] != leaf_of[share.node] for stage in found.stages for share in stage.peers)
    uneven = abs(leaves.count("a") - leaves.count("b"))
    assert found.multicast
    assert crossings <= uneven, "those behind a switch are as many as its copy feeds, and the others cross"


@pytest.mark.parametrize("ends", [20, 40, 52, 64, 76])
def test_two_nodes_fed_by_two_copies_are_a_multicast_that_serves_early_whatever_share_the_ends_have(ends: int) -> None:
    """Ends of more than half the model were in both groups' parts, so that the first stage had them with the second."""
    found = planned([*new(2), holder("has0"), holder("has1")], burst(2, layout=in_chunks(ends, 12)))
    assert (found.multicast, found.pipelines) == ("direct from 2 sources", [[0, 1]])
    assert found.serve_s[0] <= 4.0 * max(0.65, ends / 100 + 0.06), "400 MB take 4 s, and one node needs all ends"
    assert found.serve_s[1] < 4.0 * 1.05


@settings(deadline=None)
@given(st.lists(st.floats(0.98, 1.02), min_size=6, max_size=6))
def test_that_pipelines_form_does_not_hang_on_which_of_two_ways_is_quicker_by_a_hair(factors: list[float]) -> None:
    """Of two ways that are as quick, the one without pipelines was taken half of the time."""
    nodes = [
        node(f"n{number}", bytes_per_s=10.0 * MB, peer_bytes_per_s=100.0 * down * MB, up=100.0 * up * MB)
        for number, (down, up) in enumerate([factors[:2], factors[2:4]])
    ]
    copies = [holder(f"has{number}", up=100.0 * up * MB) for number, up in enumerate(factors[4:])]
    found = planned([*nodes, *copies], burst(2, layout=in_chunks(52, 12)))
    assert found.multicast == "direct from 2 sources"
    assert [sorted(pipeline) for pipeline in found.pipelines] == [[0, 1]]
    assert found.serve_s[0] < 0.65 * found.serve_s[1]


@pytest.mark.parametrize("up", [99.0, 90.0])
def test_copies_that_send_a_little_slower_than_new_nodes_receive_make_no_less_of_a_pipeline(up: float) -> None:
    """Reading from both at once, all were whole a little sooner, and none served before."""
    copies = [holder(name, up=up * MB) for name in ("has0", "has1")]
    found = planned([*new(2), *copies], burst(2, layout=in_chunks(52, 12)))
    assert (found.multicast, found.pipelines) == ("direct from 2 sources", [[0, 1]])
    assert found.serve_s[0] < 0.7 * found.serve_s[1]


def test_a_chunk_in_which_the_last_layer_ends_and_the_head_begins_comes_with_the_layers() -> None:
    """It was sent with the ends, which the second stage gets last, so that the first one had to have most layers."""
    ends_bytes, chunks = 52 * 4 * MB, [(25 + 4 * layer, 30 + 4 * layer) for layer in range(12)]
    layout = CheckpointLayout(LayerLayout(ends_bytes, [16 * MB] * 12, chunks, [(0, 26), (73, 100)]))
    found = planned([*new(2), holder("has0"), holder("has1")], burst(2, layout=layout))
    assert found.pipelines == [[0, 1]]
    assert found.serve_s[0] <= 0.63 * 4.0, "400 MB take 4 s, and the ends are 52% of them"


def test_what_one_copy_feeds_serves_once_it_is_whole() -> None:
    """The model has left the copy no sooner than the first node is whole."""
    found = planned([*new(3), holder()], burst(3, layout=in_chunks(20, 8)))
    assert found.multicast
    assert not found.pipelines


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 4), st.integers(2, 6), st.integers(0, 40), st.integers(1, 8), st.lists(st.integers(1, 8), min_size=6)
)
def test_each_pipeline_of_a_multicast_has_each_layer_once_and_each_node_is_in_one(
    copies: int, count: int, ends: int, layers: int, rates: list[int]
) -> None:
    nodes = [node(f"n{index}", bytes_per_s=5.0 * MB, up=rates[index] * 25.0 * MB) for index in range(count)]
    layout = in_chunks(ends, layers)
    found = planned([*nodes, *[holder(f"has{index}") for index in range(copies)]], burst(count, layout=layout))
    members = [place for pipeline in found.pipelines for place in pipeline]
    assert len(members) == len(set(members))
    assert found.serve_s == sorted(found.serve_s)
    for pipeline in found.pipelines:
        stages = [found.stages[place] for place in pipeline]
        assert [stage.first for stage in stages] == [0, *[stage.end for stage in stages[:-1]]]
        assert stages[-1].end == layers
        assert all(stage.first < stage.end for stage in stages)
    for place, stage in enumerate(found.stages if found.multicast else []):
        assert place in members or (stage.first, stage.end) == (0, layers)
        assert sorted(chunk for pull in stage.pulls for chunk in range(pull.first, pull.end)) == list(range(100))


def test_one_worker_and_a_burst_without_a_copy_are_no_multicast() -> None:
    assert planned([*new(4), holder()], burst(1)).multicast == ""
    assert planned(new(4), burst(4)).multicast == ""
    assert planned([*new(4), holder()], burst(4, chunks=0)).multicast == "", "what to pull is not known"
    assert planned([*new(1), holder()], burst(4)).multicast == "", "one node is no multicast"
    silent = [replace(one, up=None) for one in new(4)]
    assert planned([*silent, holder()], burst(4)).multicast == "", "they could pass nothing on"


def test_copies_whose_uplinks_are_promised_are_left_alone() -> None:
    promised = PendingFetch(WorkerId("w"), CheckpointId("d"), 100 * MB, 1.0)
    busy = holder("busy", free_bytes=0)
    busy = replace(busy, up=uplink(100.0 * MB, (), [promised], 0.0))
    assert planned([*new(4), busy], burst(4)).multicast == ""
    found = planned([*new(4), busy, holder("idle")], burst(4))
    assert {share.node for stage in found.stages for share in stage.peers} <= {"idle", "n0", "n1", "n2", "n3"}


def test_a_multicast_has_at_most_so_many_receivers_and_the_slo_counts() -> None:
    found = planned([*new(12), holder()], burst(12))
    assert len(found.stages) == RECEIVERS_MOST
    assert planned([*new(4), holder()], burst(4, slo=SLO(ttft_s=30))).meets_slo


def test_a_multicast_is_on_the_uplinks_of_all_that_send() -> None:
    cluster, wanted = Cluster([*new(4), holder()]), burst(4)
    found = plan_starts(wanted, cluster, 0.0)
    taken(found, cluster, wanted, 0.0)
    sent = sum(fetch.pending_bytes for state in cluster if state.up is not None for fetch in state.up.fetches)
    assert sent == pytest.approx(4 * 400 * MB, abs=100)
    assert all(state.held[CHAT].coming for state in cluster if state.node != "has")


@pytest.mark.parametrize("region", ["eu", ""])
def test_nodes_beside_the_copy_are_found_however_many_are_elsewhere(region: str) -> None:
    elsewhere = [
        node(f"a{index}", bytes_per_s=10.0 * MB, peer_bytes_per_s=100.0 * MB, region="us") for index in range(20)
    ]
    found = planned([*elsewhere, *new(4, region=region), holder(region=region)], burst(4))
    assert found.multicast
    assert sorted(names(found)) == ["n0", "n1", "n2", "n3"]


def test_a_copy_in_another_region_than_the_functions_is_no_beginning() -> None:
    wanted = burst(4, wanted=PlacementConstraints(regions=("eu",)))
    nodes = [*new(4, region="us"), node("b", region="eu", bytes_per_s=10.0 * MB)]
    found = planned([*nodes, holder(region="us")], wanted)
    assert (found.multicast, names(found)) == ("", ["b"])
