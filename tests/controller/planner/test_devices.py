"""Devices in plans: heterogeneous nodes with up to eight devices each, by laws and by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetstart.controller.planner.checkpoint_layout import EVERY_LAYER
from fleetstart.controller.planner.cluster import Cluster
from fleetstart.controller.planner.constraints import PlacementConstraints
from fleetstart.controller.planner.devices import (
    DeviceNeed,
    choose_devices,
    could_hold,
    device_room,
    load_bytes_per_s,
    mean_speeds,
    raised_share,
)
from fleetstart.controller.planner.estimates import SLOWNESS_MAX, slowness
from fleetstart.controller.planner.node_state import HeldLayers, NodeState
from fleetstart.controller.planner.plan import Plan, PlanRequest
from fleetstart.controller.planner.selection import WORTH, make_plan
from fleetstart.runtime.contract.function.spec import SLO
from fleetstart.runtime.contract.node.devices import DeviceId, DeviceReport, DeviceRequest, parse_request
from tests.controller.planner.worlds import MB, measured, names, node, request, taken

GPU_TYPES = ("T4", "H100")


def gpu(at: int, mb: int = 1000, **fields: Any) -> DeviceReport:
    values: dict[str, Any] = {"kind": "cuda", "type": "H100", **fields}
    return DeviceReport(id=DeviceId(f"{values['kind']}:{at}"), memory_bytes=mb * MB, **values)


def wanting(text: object, **fields: Any) -> PlanRequest:
    """400 MB of weights and 100 MB of KV cache, all of them on devices."""
    need = DeviceNeed(parse_request(text), fields.pop("cuda", False), fields.pop("short", 0))
    values = {"kv_bytes": 100 * MB, "on_device": True, "wanted": PlacementConstraints(devices=need), **fields}
    return request(**values)


def devices_of(plan: Plan) -> list[list[str]]:
    return [[share.id for share in stage.devices] for stage in plan.stages]


# ── laws ───────────────────────────────────────────────────────────────────────────────────────────

DEVICES = st.lists(
    st.builds(
        lambda kind, name, size, rate, speed: (kind, "cpu" if kind == "cpu" else name, size, rate, speed),
        st.sampled_from(["cpu", "cuda"]),
        st.sampled_from(GPU_TYPES),
        st.integers(1, 16),
        st.sampled_from([0.0, 1e9, 25e9]),
        st.sampled_from([0.0, 5e9, 2e12]),
    ),
    max_size=8,
).map(
    lambda found: tuple(
        DeviceReport(
            id=DeviceId(f"{kind}:{at}"),
            kind=kind,
            type=name,
            memory_bytes=size * 50 * MB,
            load_bytes_per_s=p,
            decode_bytes_per_s=speed,
        )
        for at, (kind, name, size, p, speed) in enumerate(found)
    )
)
NODES = st.lists(st.tuples(DEVICES, st.integers(1, 8), st.integers(2, 40)), min_size=1, max_size=5).map(
    lambda rows: [
        node(f"n{at}", devices=devices, bytes_per_s=rate * 25.0 * MB, free_bytes=free * 50 * MB, memory_bytes=2000 * MB)
        for at, (devices, rate, free) in enumerate(rows)
    ]
)
REQUESTS = st.builds(
    lambda text, model, layer, kv, cuda, short, slo, speeds, measured_on: wanting(
        text, on_device=model, layer_bytes=layer * MB, kv_bytes=kv * MB, cuda=cuda, short=short * MB,
        slo=SLO(ttft_s=5) if slo else None, speeds=speeds, measures=measured(device_bytes_per_s=measured_on),
    ),
    st.sampled_from([1, 2, "T4", "H100:2", "cpu", "cpu:2", 4]) | st.integers(1, 16).map(lambda n: f"{n * 50 * MB}B"),
    st.booleans(), st.integers(1, 80), st.integers(0, 90), st.booleans(), st.sampled_from([0, 0, 0, 300]),
    st.booleans(), st.sampled_from([{}, {"H100": 2e12}, {"T4": 2e11, "H100": 2e12, "cpu": 1e10}]),
    st.sampled_from([0.0, 1e11]),
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=150)
@given(NODES, st.lists(REQUESTS, min_size=1, max_size=8))
def test_no_device_is_overcommitted_and_each_worker_is_where_it_can_run(
    nodes: list[NodeState], wanted: list[PlanRequest]
) -> None:
    cluster = Cluster(nodes)
    for number, one in enumerate(wanted):
        one = replace(one, patient=False)
        before = {state.node: state for state in cluster}
        plan = make_plan(one, cluster, 0.0)
        assert plan.stages or plan.error is not None
        need = one.wanted.devices
        assert need is not None
        assert len(set(names(plan))) == len(plan.stages)
        for stage in plan.stages:
            there = {device.id: device for device in before[stage.node].devices}
            assert len(stage.devices) == need.request.count
            assert len({there[share.id].type for share in stage.devices}) == 1
            assert all(need.suits(there[share.id]) for share in stage.devices)
            cut = one.layout.whole if stage.full else one.layout.stage(stage.first, stage.end)
            held_bytes = sum(share.memory_bytes for share in stage.devices)
            assert held_bytes >= one.device_bytes(cut)
            assert held_bytes > need.raised_bytes
        taken(plan, cluster, one, 0.0, name=f"w{number}-")
    for state in cluster:
        assert state.free_bytes >= 0
        assert all(0 <= device.reserved_bytes <= device.memory_bytes for device in state.devices)


@settings(max_examples=150)
@given(NODES, REQUESTS)
def test_a_model_is_started_if_a_node_can_run_all_of_it_and_refused_with_its_devices_if_none_can_hold_a_part(
    nodes: list[NodeState], wanted: PlanRequest
) -> None:
    need = wanted.wanted.devices
    assert need is not None
    plan = make_plan(replace(wanted, patient=False), Cluster(nodes), 0.0)
    alone = [
        state
        for state in nodes
        if (shares := choose_devices(need, state.devices, wanted.device_bytes(wanted.layout.whole))) is not None
        and state.free_bytes
        >= wanted.segment_bytes
        + max(wanted.memory_bytes, sum(share.memory_bytes for share in shares if share.id.startswith("cpu")))
    ]
    if alone:
        assert plan.stages
    if not any(could_hold(need, state.devices) for state in nodes):
        assert plan.error is not None
        assert "gpu=" in plan.error.message


@given(DEVICES, REQUESTS, st.integers(0, 1600))
def test_what_is_chosen_suffices_and_the_room_is_the_most_that_can_be_chosen(
    devices: tuple[DeviceReport, ...], wanted: PlanRequest, least_mb: int
) -> None:
    need = wanted.wanted.devices
    assert need is not None
    room = device_room(need, devices)
    chosen = choose_devices(need, devices, least_mb * MB)
    assert (chosen is not None) == (bool(room) and room >= least_mb * MB)
    if chosen is not None:
        assert len({share.id for share in chosen}) == len(chosen) == need.request.count
        assert least_mb * MB <= sum(share.memory_bytes for share in chosen) <= room


# ── by hand ────────────────────────────────────────────────────────────────────────────────────────


def test_two_models_that_do_not_fit_one_device_go_to_two() -> None:
    cluster = Cluster([node("a", devices=(gpu(0), gpu(1)), free_bytes=4000 * MB)])
    places = []
    for number in range(3):
        plan = make_plan(wanting(f"{600 * MB}B"), cluster, 0.0)
        places.append(devices_of(plan))
        taken(plan, cluster, wanting(f"{600 * MB}B"), 0.0, name=f"w{number}")
    assert places == [[["cuda:0"]], [["cuda:1"]], []]
    assert plan.error is not None
    assert "free are 0.373 of 0.931 GiB of cuda:0 on a, 0.373 of 0.931 GiB of cuda:1 on a" in plan.error.message


def test_shares_are_packed_so_that_whole_devices_stay_free() -> None:
    cluster = Cluster([node("a", devices=(gpu(0), gpu(1)), free_bytes=9000 * MB)])
    seen: Counter[str] = Counter()
    for number in range(2):
        plan = make_plan(wanting(f"{500 * MB}B"), cluster, 0.0)
        seen.update(devices_of(plan)[0])
        taken(plan, cluster, wanting(f"{500 * MB}B"), 0.0, name=f"w{number}")
    assert seen == {"cuda:0": 2}
    assert devices_of(make_plan(wanting(1), cluster, 0.0)) == [["cuda:1"]]


def test_whole_devices_are_the_smallest_that_suffice_and_connected_if_there_are_such() -> None:
    some = (gpu(0, 3000), gpu(1, 1000), gpu(2, 400), gpu(3, 600))
    assert devices_of(make_plan(wanting(1), Cluster([node("a", devices=some)]), 0.0)) == [["cuda:3"]]
    linked = (gpu(0, links=(DeviceId("cuda:2"),)), gpu(1), gpu(2, links=(DeviceId("cuda:0"),)))
    assert devices_of(make_plan(wanting(2), Cluster([node("a", devices=linked)]), 0.0)) == [["cuda:0", "cuda:2"]]


def test_a_model_never_goes_to_a_node_that_cannot_run_it_however_fast() -> None:
    nodes = [
        node("small", devices=(gpu(0, 300),), bytes_per_s=1e12),
        node("other", devices=(gpu(0, type="T4"),), bytes_per_s=1e12),
        node("none", bytes_per_s=1e12),
        node("full", devices=(gpu(0, reserved_bytes=600 * MB),), bytes_per_s=1e12),
        node("fits", devices=(gpu(0, 600),), bytes_per_s=1e6),
    ]
    model = wanting("H100", layers=1, layer_bytes=400 * MB)
    assert names(make_plan(model, Cluster(nodes), 0.0)) == ["fits"]
    plan = make_plan(model, Cluster(nodes[:4]), 0.0)
    assert plan.error is not None


def test_a_cache_larger_than_host_memory_needs_a_gpu_also_where_cpu_devices_are() -> None:
    nodes = [node("cpu", devices=(gpu(0, kind="cpu", type="cpu"),), bytes_per_s=1e12), node("gpu", devices=(gpu(0),))]
    assert names(make_plan(wanting(1, cuda=True), Cluster(nodes), 0.0)) == ["gpu"]


def test_a_model_too_large_for_any_device_starts_in_stages() -> None:
    nodes = [node(f"n{at}", devices=(gpu(0, 300), gpu(1, 300))) for at in range(2)]
    plan = make_plan(wanting(1), Cluster(nodes), 0.0)
    assert len(plan.stages) == 2
    assert all(len(stage.devices) == 1 for stage in plan.stages)


def test_a_second_worker_of_a_node_gets_another_device_and_fetches_nothing() -> None:
    held = HeldLayers(host=EVERY_LAYER)
    state = node("a", devices=(gpu(0, reserved_bytes=1000 * MB), gpu(1)), workers=1, holds=held)
    stage = make_plan(wanting(1), Cluster([state, node("b", devices=(gpu(0),))]), 0.0).stages[0]
    assert (stage.node, [share.id for share in stage.devices], stage.missing_bytes) == ("a", ["cuda:1"], 0)
    assert stage.node in names(make_plan(wanting(1), Cluster([state]), 0.0))


def test_a_cpu_device_takes_its_share_from_the_host() -> None:
    cpu = gpu(0, 1000, kind="cpu", type="cpu")
    roomy, short = (Cluster([node("a", devices=(cpu,), free_bytes=free * MB)]) for free in (1000, 999))
    stage = make_plan(wanting(f"{600 * MB}B"), roomy, 0.0).stages[0]
    assert stage.reserved_bytes == 1000 * MB  # the share instead of its own 100 MB, and 400 MB of weights
    assert not make_plan(wanting(f"{600 * MB}B"), short, 0.0).stages


def test_the_measured_rate_of_a_device_decides_between_equal_nodes() -> None:
    nodes = [
        node("slow", devices=(gpu(0, load_bytes_per_s=0.1e9),), holds=HeldLayers(host=EVERY_LAYER)),
        node("quick", devices=(gpu(0, load_bytes_per_s=50e9),), holds=HeldLayers(host=EVERY_LAYER)),
    ]
    plan = make_plan(wanting(1), Cluster(nodes), 0.0)
    assert names(plan) == ["quick"]
    assert plan.ready_s == pytest.approx(400 * MB / 50e9)
    assert make_plan(wanting(1), Cluster(nodes[:1]), 0.0).ready_s == pytest.approx(4.0)


@given(
    measured_on=st.floats(1e9, 1e13),
    speeds=st.tuples(st.floats(1e9, 1e13), st.floats(1e9, 1e13)),
    others=st.sampled_from([{}, {"H100": 3e12}]),
)
def test_times_are_as_much_longer_as_devices_are_slower_and_the_quicker_device_is_taken(
    measured_on: float, speeds: tuple[float, float], others: dict[str, float]
) -> None:
    held = HeldLayers(host=EVERY_LAYER)
    one = wanting(1, measures=measured(device_bytes_per_s=measured_on), speeds=others)

    def planned(*rates: float) -> Plan:
        nodes = [
            node(f"n{at}", devices=(gpu(0, decode_bytes_per_s=rate),), holds=held) for at, rate in enumerate(rates)
        ]
        return make_plan(one, Cluster(nodes), 0.0)

    alone = [planned(rate) for rate in speeds]
    for plan, rate in zip(alone, speeds, strict=True):
        factor = min(SLOWNESS_MAX, max(1 / SLOWNESS_MAX, measured_on / rate))
        assert plan.tpot_s == pytest.approx(0.05 * factor)
        assert plan.ttft_s - plan.ready_s == pytest.approx(0.1 * factor)
    assert planned(*speeds).ttft_s <= min(plan.ttft_s for plan in alone) / WORTH
    unknown = planned(0.0)
    assert unknown.tpot_s == pytest.approx(0.05 * slowness(one.measures, others.get("H100", 0.0)))


def test_a_quick_device_behind_a_slower_link_is_considered_among_many_slow_ones() -> None:
    """Nodes are ranked by their links: of each type, the best are examined."""
    slow = [node(f"t{at}", devices=(gpu(0, type="T4", decode_bytes_per_s=2e10),), bytes_per_s=200.0 * MB)
            for at in range(20)]  # fmt: skip
    quick = node("h", devices=(gpu(0, decode_bytes_per_s=2e12),), bytes_per_s=150.0 * MB)
    one = wanting(1, speeds={"T4": 2e10, "H100": 2e12}, layer_bytes=5 * MB,
                  measures=measured(prefill_s=10.0, device_bytes_per_s=2e10))  # fmt: skip
    assert names(make_plan(one, Cluster([*slow, quick]), 0.0)) == ["h"]


def test_the_speed_of_a_type_is_the_mean_of_its_devices_that_have_run_steps() -> None:
    devices = (gpu(0, decode_bytes_per_s=1e12), gpu(1), gpu(2, decode_bytes_per_s=3e12), gpu(3, type="T4"))
    assert mean_speeds(devices) == {"H100": 2e12}


def test_devices_load_their_parts_side_by_side_and_the_prior_counts_where_nothing_was_measured() -> None:
    devices = (gpu(0, load_bytes_per_s=3e9), gpu(1))
    shares = choose_devices(DeviceNeed(DeviceRequest(count=2)), devices)
    assert shares is not None
    assert load_bytes_per_s(devices, shares, 10e9) == 13e9
    assert load_bytes_per_s(devices, (), 10e9) == 10e9


def test_after_a_shortage_a_worker_gets_a_larger_share_or_a_larger_device_until_there_is_none() -> None:
    cluster = Cluster([node("a", devices=(gpu(0, 1000), gpu(1, 2000)))])
    text = f"{600 * MB}B"
    again = make_plan(wanting(text, short=600 * MB), cluster, 0.0).stages[0]
    assert [share.memory_bytes for share in again.devices] == [raised_share(600 * MB)] == [750 * MB]
    assert devices_of(make_plan(wanting(1, short=1000 * MB), cluster, 0.0)) == [["cuda:1"]]
    assert make_plan(wanting(1, short=2000 * MB), cluster, 0.0).error is not None
    assert make_plan(wanting(text, short=2000 * MB), cluster, 0.0).error is not None
