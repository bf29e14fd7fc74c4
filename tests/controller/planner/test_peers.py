"""Fetches from the memory of other nodes: when they are used, what they take, and that no promise is broken by them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.planner.checkpoint_layout import EVERY_LAYER, layer_set
from fleetstart.controller.planner.cluster import Cluster
from fleetstart.controller.planner.links.contention import PendingFetch
from fleetstart.controller.planner.node_state import HeldLayers, NodeState, uplink
from fleetstart.controller.planner.plan import PeerShare, Plan
from fleetstart.controller.planner.selection import make_plan
from fleetstart.runtime.contract.function.spec import SLO
from fleetstart.runtime.contract.ids import CheckpointId, WorkerId
from tests.controller.planner.worlds import MB, late_ones, measured, names, node, request, taken

WHOLE = HeldLayers(host=EVERY_LAYER)


def holder(name: str, holds: HeldLayers = WHOLE, up: float = 100.0 * MB, **fields: Any) -> NodeState:
    """A node without room for a worker."""
    return node(name, holds=holds, up=up, free_bytes=0, **fields)


def plan(*nodes: NodeState, **fields: Any) -> Plan:
    return make_plan(request(measures=measured(prefill_s=0.0), **fields), Cluster(nodes), 0.0)


def test_weights_come_from_a_peer_and_the_store_is_left_alone() -> None:
    found = plan(node("new"), holder("has"))
    (stage,) = found.stages
    assert stage.peers == [PeerShare(holder("has").node, 400 * MB)]
    assert (stage.store_bytes, stage.missing_bytes) == (0, 400 * MB)
    assert found.ttft_s == pytest.approx(4.0), "no faster than its own link"


def test_a_peer_that_is_slower_than_the_store_is_not_used() -> None:
    for up, used in ((95.0 * MB, True), (50.0 * MB, False)):
        (stage,) = plan(node("new"), holder("has", up=up)).stages
        assert bool(stage.peers) is used
        assert stage.store_bytes == (0 if used else 400 * MB)


def test_a_network_that_was_found_faster_than_the_store_is_used_at_its_rate() -> None:
    found = plan(node("new", peer_bytes_per_s=400.0 * MB), holder("a", up=400.0 * MB))
    assert found.ttft_s == pytest.approx(1.0)
    found = plan(node("new", peer_bytes_per_s=800.0 * MB), *(holder(name, up=200.0 * MB) for name in "abcd"))
    assert found.ttft_s == pytest.approx(0.5), "four uplinks together"
    assert sorted(share.size_bytes for share in found.stages[0].peers) == [100 * MB] * 4


def test_layers_come_from_who_has_them_and_the_rest_from_the_store() -> None:
    some, others = HeldLayers(host=layer_set(0, 3)), HeldLayers(host=layer_set(3, 6))
    (stage,) = plan(node("new"), holder("a", some), holder("b", others)).stages
    assert dict(stage.peers) == {"a": 150 * MB, "b": 150 * MB}
    assert stage.store_bytes == 100 * MB
    assert stage.fetch_s == pytest.approx(4.0)


def test_disk_and_peers_are_read_in_parallel() -> None:
    fast = {"peer_bytes_per_s": 1000.0 * MB, "disk_bytes_per_s": 1000.0 * MB}
    (stage,) = plan(node("new", **fast, holds=HeldLayers(disk=EVERY_LAYER)), holder("a", up=1000.0 * MB)).stages
    assert stage.peer_bytes == 200 * MB
    assert stage.fetch_s == pytest.approx(0.2)


def test_a_node_that_receives_it_passes_it_on() -> None:
    cluster = Cluster([node("a", up=100 * MB), node("b", up=100 * MB, workers=1)])
    wanted = request(layer_bytes=10 * MB, measures=measured(prefill_s=0.0, library_s=1.0))
    first = make_plan(wanted, cluster, 0.0)
    assert (names(first), first.stages[0].store_bytes) == (["a"], 80 * MB)
    taken(first, cluster, wanted, 0.0)
    second = make_plan(request(layer_bytes=10 * MB, measures=wanted.measures, memory_bytes=900 * MB), cluster, 0.2)
    (stage,) = second.stages
    assert (stage.node, stage.store_bytes, dict(stage.peers)) == ("b", 0, {"a": 80 * MB})
    assert stage.fetch_s == pytest.approx(0.8), "the first has it after 0.6 s, its own link takes 0.8"


def test_starts_at_once_pass_on_what_the_only_holder_has() -> None:
    """New ones read from those that are receiving, too, as the holder's uplink has no full share for them."""
    cluster = Cluster([holder("has"), *(node(f"n{index}", up=100.0 * MB, memory_bytes=500 * MB) for index in range(4))])
    wanted = request(1, 400 * MB, measures=measured(prefill_s=0.0), memory_bytes=600 * MB)
    readers = []
    for number in range(4):
        found = make_plan(wanted, cluster, 0.0)
        (stage,) = found.stages
        readers.append([share.node for share in stage.peers])
        assert stage.store_bytes == 0
        assert stage.fetch_s == pytest.approx(4.0)
        taken(found, cluster, wanted, 0.0, f"w{number}-")
    assert readers[0] == ["has"]
    assert all("has" not in peers or len(peers) > 1 for peers in readers[1:]), "its uplink alone would take 8 s"


def test_other_regions_are_asked_for_nothing() -> None:
    (stage,) = plan(node("new", region="eu"), holder("far", region="us")).stages
    assert not stage.peers
    (stage,) = plan(node("new", region="eu"), holder("far", region="us"), holder("near", region="eu")).stages
    assert [share.node for share in stage.peers] == ["near"]


def test_a_peer_server_on_loopback_is_for_its_machine() -> None:
    for machine, used in (("m", True), ("other", False)):
        (stage,) = plan(node("new", machine=machine), holder("has", machine="m", peers_on="m")).stages
        assert bool(stage.peers) is used


def test_the_stages_of_a_group_share_the_uplink_of_their_peer() -> None:
    """So a group that fetches all from one node is no quicker than a single worker; with four holders it is."""
    new = [node(f"n{index}", peer_bytes_per_s=100.0 * MB) for index in range(4)]
    assert plan(*new).ttft_s == pytest.approx(1.0), "from the store, a quarter each"
    one = plan(*(node(f"n{index}", bytes_per_s=5.0 * MB, peer_bytes_per_s=100.0 * MB) for index in range(4)),
               holder("a"))  # fmt: skip
    assert len(one.stages) == 1
    four = plan(*(node(f"n{index}", bytes_per_s=5.0 * MB, peer_bytes_per_s=100.0 * MB) for index in range(4)),
                *(holder(name) for name in "abcd"))  # fmt: skip
    assert len(four.stages) == 4
    assert four.ttft_s == pytest.approx(1.0)


def test_a_group_fetches_some_stages_from_a_peer_and_the_others_from_the_store() -> None:
    """One uplink would take 4 s for all four, the store alone 1 s for each quarter."""
    found = plan(*(node(f"n{index}", up=100.0 * MB) for index in range(4)), holder("has"))
    assert len(found.stages) == 4
    assert found.ttft_s == pytest.approx(1.0)
    assert sum(stage.peer_bytes for stage in found.stages) == 100 * MB
    assert sum(stage.store_bytes for stage in found.stages) == 300 * MB


def test_an_uplink_that_has_promised_itself_is_not_used() -> None:
    promised = PendingFetch(WorkerId("w"), CheckpointId("d"), 400 * MB, 5.0)
    busy = uplink(100.0 * MB, (), [promised], 0.0)
    found = plan(node("new"), replace(holder("busy"), up=busy))
    assert found.stages[0].store_bytes == 400 * MB
    patient = uplink(100.0 * MB, (), [promised._replace(deadline_s=9.0)], 0.0)
    found = plan(node("new", bytes_per_s=40.0 * MB, peer_bytes_per_s=100.0 * MB),
                 replace(holder("busy"), up=patient))  # fmt: skip
    assert found.stages[0].peer_bytes == 400 * MB
    assert found.ttft_s == pytest.approx(8.0), "half of the uplink each"


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 255), st.booleans()), min_size=2, max_size=7),
    st.lists(st.tuples(st.floats(0.2, 20), st.floats(0, 2)), min_size=1, max_size=6),
)
def test_every_promise_of_an_uplink_stays_kept(
    nodes: list[tuple[int, int, bool]], starts: list[tuple[float, float]]
) -> None:
    cluster = Cluster(
        node(f"n{index}", bytes_per_s=rate * 25.0 * MB, up=rate * 25.0 * MB, workers=int(busy),
             free_bytes=5000 * MB, memory_bytes=5000 * MB, holds=HeldLayers(host=held))
        for index, (rate, held, busy) in enumerate(nodes)
    )  # fmt: skip
    now_s, kept = 0.0, set[WorkerId]()
    for number, (slo_s, wait_s) in enumerate(starts):
        now_s += wait_s
        wanted = request(slo=SLO(ttft_s=slo_s), memory_bytes=400 * MB, kv_bytes=300 * MB)
        found = make_plan(wanted, cluster, now_s)
        for stage in found.stages:
            assert sum(share.size_bytes for share in stage.peers) + stage.store_bytes <= stage.missing_bytes + 9
            assert all(share.node != stage.node for share in stage.peers)
        taken(found, cluster, wanted, now_s, f"w{number}-")
        ups = [state.up for state in cluster if state.up is not None]
        late = {worker for up in ups for worker in late_ones(up, now_s)}
        assert not kept & late
        kept |= {fetch.worker for up in ups for fetch in up.at(now_s).fetches} - late
