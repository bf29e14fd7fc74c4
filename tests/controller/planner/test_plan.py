"""What is chosen and why: scenes by hand, and laws that hold in every cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from fleetstart.controller.planner.checkpoint_layout import EVERY_LAYER, CheckpointLayout, layer_set
from fleetstart.controller.planner.cluster import Cluster
from fleetstart.controller.planner.node_state import HeldLayers
from fleetstart.controller.planner.plan import Plan, PlanRequest
from fleetstart.controller.planner.selection import make_plan
from fleetstart.runtime.contract.function.spec import SLO
from fleetstart.runtime.contract.ids import NodeId
from fleetstart.runtime.contract.weights.stage import LayerLayout
from tests.controller.planner.worlds import CHAT, MB, measured, names, node, request, taken


def four(**fields: object) -> Cluster:
    return Cluster(node(f"n{index}", **fields) for index in range(4))


def test_a_quarter_of_the_model_a_node_takes_a_quarter_of_the_time() -> None:
    found = make_plan(request(measures=measured(prefill_s=0.0)), four(), 0.0)
    assert names(found) == ["n0", "n1", "n2", "n3"]
    assert found.ttft_s == pytest.approx(1.0), "400 MB in four parts at 100 MB/s"
    assert [(stage.first, stage.end) for stage in found.stages] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert found.stages[0].full, "the head has the memory to become whole"
    assert found.whole_s == pytest.approx(3.0), "the other 300 MB, at the head's own link"
    assert found.meets_slo


def test_a_plan_says_what_overlapping_hides() -> None:
    one = Cluster([node("a", start_s=0.5, device_bytes_per_s=400.0 * MB)])
    found = make_plan(request(measures=measured(library_s=0.7)), one, 0.0)
    assert found.ttft_s == pytest.approx(4.1), "the fetch, and prefill"
    assert found.sequential_ttft_s == pytest.approx(0.5 + 0.7 + 4.0 + 1.0 + 0.1)


def test_without_an_slo_a_larger_group_must_be_worth_it() -> None:
    slow_start = four(start_s=0.9)
    found = make_plan(request(measures=measured(library_s=1.0, prefill_s=0.0)), slow_start, 0.0)
    assert len(found.stages) == 2, "two are ready after 2.0 s, more of them after 1.9"
    assert "not 15% quicker" in found.considered[-1].why_not
    small = make_plan(request(layer_bytes=MB, measures=measured(library_s=1.0)), four(), 0.0)
    assert len(small.stages) == 1


def test_with_an_slo_the_cheapest_that_keeps_it_is_taken() -> None:
    sizes = {}
    for ttft_s in (5.0, 2.5, 1.6, 1.2):
        found = make_plan(request(slo=SLO(ttft_s=ttft_s), measures=measured(prefill_s=0.0)), four(), 0.0)
        sizes[ttft_s] = len(found.stages)
        assert found.meets_slo
        assert found.ttft_s <= ttft_s
    assert sizes == {5.0: 1, 2.5: 2, 1.6: 3, 1.2: 4}


def test_waiting_leaves_less_of_the_slo() -> None:
    found = make_plan(request(slo=SLO(ttft_s=5), waited_s=2.7, measures=measured(prefill_s=0.0)), four(), 0.0)
    assert len(found.stages) == 2
    assert found.stages[0].fetch_within_s == pytest.approx(2.3)


def test_a_tpot_slo_asks_for_whole_workers_on_shared_devices() -> None:
    """Eq. 2: two low-memory stages cost 0.1 s a token, one whole and one low 0.075 s, two whole 0.05 s."""
    for tpot_s, full in ((0.08, 1), (0.06, 2)):
        found = make_plan(request(slo=SLO(ttft_s=2.5, tpot_s=tpot_s)), four(workers=1), 0.0)
        assert [len(found.stages), sum(stage.full for stage in found.stages)] == [2, full]
        assert found.tpot_s == pytest.approx({1: 0.075, 2: 0.05}[full])


def test_on_free_devices_a_pipelines_tokens_take_what_the_models_take_and_the_hops() -> None:
    found = make_plan(request(measures=measured(prefill_s=0.0, hop_s=0.001)), four(), 0.0)
    assert [stage.full for stage in found.stages] == [True, False, False, False]
    assert found.tpot_s == pytest.approx(0.05 + 4 * 0.001)


def test_an_impossible_slo_is_planned_as_none_and_promised_nothing() -> None:
    hasty, plain = (make_plan(request(slo=slo), four(), 0.0) for slo in (SLO(ttft_s=0.01), None))
    assert names(hasty) == names(plain) == ["n0", "n1", "n2", "n3"]
    assert (hasty.meets_slo, plain.meets_slo) == (False, True)
    assert hasty.stages[0].fetch_within_s is None
    assert "no candidate keeps the SLO" in hasty.reason


def second(slo_s: float, **fields: Any) -> PlanRequest:
    """Of another function, while a first one has promised the links of all nodes for 1.1 s."""
    return request(slo=SLO(ttft_s=slo_s), checkpoint=type(CHAT)("d" * 64), measures=measured(prefill_s=0.0), **fields)


def promised() -> Cluster:
    cluster = four(free_bytes=5000 * MB)
    first = request(slo=SLO(ttft_s=1.1), measures=measured(prefill_s=0.0))
    taken(make_plan(first, cluster, 0.0), cluster, first, 0.0)
    return cluster


def test_a_start_waits_for_links_if_that_keeps_its_slo() -> None:
    found = make_plan(second(2.2), promised(), 0.2)
    assert names(found) == []
    assert found.wait_s == pytest.approx(0.8)
    assert found.error is not None
    assert "postponed by 0.80 s" in found.error.message
    later = make_plan(second(2.2, waited_s=0.8), promised(), 1.0)
    assert len(later.stages) == 4
    assert later.meets_slo


def test_a_start_waits_for_links_if_it_is_late_anyway_and_waiting_is_quicker() -> None:
    cluster = Cluster([*promised(), node("slow", bytes_per_s=50 * MB)])
    for slo_s, patient, wait_s in ((0.5, True, 0.8), (0.5, False, 0.0), (9.0, True, 0.0)):
        found = make_plan(second(slo_s, patient=patient), cluster, 0.2)
        assert found.wait_s == pytest.approx(wait_s)
        assert names(found) == ([] if wait_s else ["slow"])


def test_nobody_waits_for_ever_for_a_link_that_stalls() -> None:
    found = make_plan(second(0.5, waited_s=1.01), Cluster([*promised(), node("slow", bytes_per_s=50 * MB)]), 0.2)
    assert names(found) == ["slow"]


def test_more_than_four_only_if_nothing_smaller_keeps_the_slo() -> None:
    many = Cluster(node(f"n{index}") for index in range(10))
    wanted = request(measures=measured(prefill_s=0.0))
    assert len(make_plan(replace(wanted, slo=SLO(ttft_s=1.0)), many, 0.0).stages) == 4
    wide = make_plan(replace(wanted, slo=SLO(ttft_s=0.6)), many, 0.0)
    assert len(wide.stages) == 8, "eight layers: five to seven stages have one of two layers"
    assert wide.meets_slo


def test_memory_is_nearer_than_disk_and_disk_than_the_store() -> None:
    nodes = [
        node("store"),
        node("disk", holds=HeldLayers(disk=EVERY_LAYER)),
        node("host", holds=HeldLayers(host=EVERY_LAYER)),
    ]
    wanted = request(slo=SLO(ttft_s=10))
    expected = {"host": 0.1, "disk": 0.5, "store": 4.1}
    for last, name in ((3, "host"), (2, "disk"), (1, "store")):
        found = make_plan(wanted, Cluster(nodes[:last]), 0.0)
        assert names(found) == [name]
        assert found.ttft_s == pytest.approx(expected[name], abs=1e-5)


def test_a_busy_node_that_has_it_is_better_than_a_free_one_that_has_not() -> None:
    nodes = [node("free"), node("busy", workers=3, holds=HeldLayers(host=EVERY_LAYER))]
    for slo in (None, SLO(ttft_s=10)):
        assert names(make_plan(request(slo=slo), Cluster(nodes), 0.0)) == ["busy"]


def test_where_no_weights_are_waited_for_no_group_is_looked_at() -> None:
    found = make_plan(
        request(measures=measured(library_s=1.0)), Cluster([*four(), node("has", holds=HeldLayers(host=-1))]), 0.0
    )
    assert names(found) == ["has"]
    assert "weights" in found.reason
    assert {one.stages for one in found.considered} == {1}


def test_a_free_device_comes_first_where_nothing_else_differs() -> None:
    nodes = [node("a", workers=1), node("b", workers=2), node("z")]
    assert names(make_plan(request(slo=SLO(ttft_s=10)), Cluster(nodes), 0.0)) == ["z"]


def test_each_stage_goes_where_its_layers_are() -> None:
    """Left by an earlier pipeline of four, in another order than the nodes' names."""
    parts = {"n0": (4, 6), "n1": (0, 2), "n2": (6, 8), "n3": (2, 4)}
    held = Cluster(node(name, holds=HeldLayers(host=layer_set(*ends))) for name, ends in parts.items())
    found = make_plan(request(), Cluster([*held, node("n4", bytes_per_s=150 * MB)]), 0.0)
    assert names(found) == ["n1", "n3", "n0", "n2"]
    assert not any(stage.missing_bytes for stage in found.stages)


def test_a_node_that_holds_all_leaves_a_stage_to_one_that_holds_it() -> None:
    held = Cluster(
        [
            node("all", holds=HeldLayers(host=EVERY_LAYER)),
            node("first", holds=HeldLayers(host=layer_set(0, 4))),
            node("none"),
        ]
    )
    found = make_plan(request(workers=2), held, 0.0)
    assert names(found) == ["first", "all"]
    assert not any(stage.missing_bytes for stage in found.stages[1:])


def test_what_is_on_its_way_is_not_fetched_twice() -> None:
    cluster, wanted = Cluster([node("a", free_bytes=2000 * MB)]), request()
    first = make_plan(wanted, cluster, 0.0)
    taken(first, cluster, wanted, 0.0)
    second = make_plan(wanted, cluster, 1.0)
    assert (second.stages[0].store_bytes, second.stages[0].reserved_bytes) == (0, 100 * MB)
    assert second.ttft_s == pytest.approx(3.1), "300 of 400 MB are still to come"


def test_two_starts_whose_promises_would_break_each_other_are_not_put_on_one_node() -> None:
    """Alone each takes 4.1 s; together 8.1 s."""
    cluster = Cluster([node("a", free_bytes=5000 * MB)])
    wanted = request(slo=SLO(ttft_s=6))
    other = replace(wanted, checkpoint=type(CHAT)("d" * 64), function=type(wanted.function)("other"), patient=False)
    first = make_plan(wanted, cluster, 0.0)
    taken(first, cluster, wanted, 0.0)
    refused = make_plan(other, cluster, 0.0)
    assert refused.stages == []
    assert refused.error is not None
    assert "promised their links" in refused.error.message
    cluster.put(node("b"))
    assert names(make_plan(other, cluster, 0.0)) == ["b"]
    cluster.drop(NodeId("b"))
    small = replace(other, layout=CheckpointLayout(LayerLayout(0, [10 * MB] * 8)))
    assert names(make_plan(small, cluster, 0.0)) == ["a"], "80 MB more take the first no more than 0.8 s"
    loose = replace(other, slo=SLO(ttft_s=9), patient=True)
    waiting = make_plan(loose, cluster, 0.0)
    assert names(waiting) == []
    assert waiting.wait_s == pytest.approx(4.0), "it could share, the first could not"
    assert names(make_plan(replace(loose, waited_s=2.5), cluster, 2.5)) == ["a"], (
        "once 250 of its 400 MB are there, it can"
    )


def test_a_group_has_room_for_the_workers_that_are_wanted() -> None:
    for workers in (1, 2, 3, 4):
        found = make_plan(request(workers=workers, slo=SLO(ttft_s=60)), four(), 0.0)
        assert sum(stage.full for stage in found.stages) == workers
        assert len(found.stages) == workers


def test_helpers_have_memory_for_what_may_be_wanted_of_them_where_it_takes_nothing_from_others() -> None:
    wanted = request(slo=SLO(ttft_s=1.2), most=3, measures=measured(prefill_s=0.0))
    for cluster, full in ((four(), 3), (four(workers=1), 1)):
        found = make_plan(wanted, cluster, 0.0)
        assert [stage.full for stage in found.stages] == [index < full for index in range(4)]


def test_a_pipeline_goes_where_no_node_has_room_for_the_whole_model() -> None:
    found = make_plan(request(slo=SLO(ttft_s=60)), four(free_bytes=310 * MB), 0.0)
    assert len(found.stages) == 2
    assert not any(stage.full for stage in found.stages)


def test_low_memory_workers_leave_out_the_cache_of_layers_that_they_have_not() -> None:
    wanted = request(memory_bytes=100 * MB, kv_bytes=80 * MB, slo=SLO(ttft_s=2.5))
    found = make_plan(wanted, four(), 0.0)
    assert [stage.memory_bytes for stage in found.stages] == [100 * MB, 60 * MB]
    assert [stage.reserved_bytes for stage in found.stages] == [500 * MB, 260 * MB]


def test_no_room_has_figures_and_no_node_a_hint() -> None:
    full = make_plan(request(), four(free_bytes=50 * MB), 0.0)
    assert full.error is not None
    assert "476 MiB" in full.error.message
    assert "47 of 953 MiB" in full.error.message
    none = make_plan(request(), Cluster(), 0.0)
    assert none.error is not None
    assert "no node is alive" in none.error.message


def test_what_is_not_made_of_layers_is_never_cut() -> None:
    whole = request()
    for layout in (CheckpointLayout(LayerLayout(400 * MB, [])), CheckpointLayout(LayerLayout(0, [400 * MB]))):
        found = make_plan(replace(whole, layout=layout), four(), 0.0)
        assert len(found.stages) == 1
        assert found.ttft_s == pytest.approx(4.1)
    bare = make_plan(replace(whole, layout=CheckpointLayout(LayerLayout(0, [])), checkpoint=None), four(), 0.0)
    assert bare.ttft_s == pytest.approx(0.1), "without weights there is nothing to fetch"


# ── laws ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_plan_is_kept_as_json() -> None:
    found = make_plan(request(), four(), 0.0)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Plan) == found
