"""Functions that ask something of their nodes: planned on those that fit as if there were no others."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.planner.accuracy_report import ObservedStart, explain, format_explanation
from fleetstart.controller.planner.cluster import Cluster
from fleetstart.controller.planner.constraints import (
    NO_CONSTRAINTS,
    PlacementConstraints,
    admits,
    region_counts,
    unmet_constraint,
)
from fleetstart.controller.planner.node_state import NodeState
from fleetstart.controller.planner.selection import make_plan
from fleetstart.runtime.contract.function.spec import SLO, Isolation
from fleetstart.runtime.contract.node.reports import Confinement
from tests.controller.planner.worlds import clusters, measured, names, node, request

REGIONS = st.sampled_from(["", "eu", "us", "asia"])
WANTED = st.builds(
    PlacementConstraints,
    st.lists(st.sampled_from(["eu", "us", "asia", "moon"]), max_size=3, unique=True).map(tuple),
    st.sampled_from(["namespaces", "gvisor", "container"]),
    st.sampled_from(["", "python", "torch"]),
    st.booleans(),
    listed=st.booleans(),
    devices=st.none(),
)
POOLS = st.sampled_from([frozenset[str](), frozenset({"python"}), frozenset({"python", "torch"})])
CONFINES: st.SearchStrategy[Confinement] = st.sampled_from(["namespaces", "plain", "none"])
OFFERS = st.tuples(
    REGIONS,
    st.sampled_from([frozenset[str](), frozenset({"gvisor"}), frozenset({"gvisor", "container"})]),
    POOLS,
    st.integers(0, 2),
    CONFINES,
)
Offer = tuple[str, frozenset[str], frozenset[str], int, Confinement]
GVISOR: Isolation = "gvisor"


def offer(
    region: str,
    isolations: frozenset[str] = frozenset(),
    pools: frozenset[str] = frozenset(),
    gpus: int = 0,
    confines: Confinement = "namespaces",
) -> NodeState:
    return replace(node("n"), region=region, isolations=isolations, pools=pools, gpus=gpus, confines=confines)


@pytest.mark.slow
@given(
    clusters(least=1),
    st.lists(OFFERS, min_size=7, max_size=7),
    WANTED,
    st.none() | st.floats(0.5, 9.0).map(lambda ttft_s: SLO(ttft_s=ttft_s)),
    st.integers(1, 4),
)
def test_a_plan_is_that_of_the_nodes_that_fit_and_of_no_others(
    cluster: Cluster,
    offers: list[Offer],
    wanted: PlacementConstraints,
    slo: SLO | None,
    workers: int,
) -> None:
    placed = [
        replace(state, region=region, isolations=isolations, pools=pools, gpus=gpus, confines=confines)
        for state, (region, isolations, pools, gpus, confines) in zip(cluster, offers, strict=False)
    ]
    fitting = [state for state in placed if admits(wanted, state)]
    asked = request(slo=slo, workers=workers, most=workers)

    found = make_plan(replace(asked, wanted=wanted), Cluster(placed), 0.0)
    alone = make_plan(asked, Cluster(replace(state, confines="namespaces") for state in fitting), 0.0)

    by_name = {state.node: state for state in placed}
    for stage in found.stages:
        assert not wanted.regions or stage.region in wanted.regions
        assert wanted.isolation == "namespaces" or wanted.isolation in by_name[stage.node].isolations
        assert not by_name[stage.node].pools or wanted.pool in ("", *by_name[stage.node].pools)
        assert not wanted.gpu or by_name[stage.node].gpus
        assert wanted.isolation != "namespaces" or by_name[stage.node].confines in (
            ("namespaces",) if wanted.listed else ("namespaces", "plain")
        )
    assert found.stages == alone.stages
    assert (tuple(found.regions), found.isolation) == wanted[:2]
    if fitting:
        assert found.considered == alone.considered
    else:
        assert found.error is not None
        why, advice = unmet_constraint(wanted, placed)
        assert why in found.error.message
        assert found.error.hint == advice


@given(WANTED, st.lists(OFFERS, max_size=5))
def test_there_is_a_lack_where_nodes_are_and_none_fits(wanted: PlacementConstraints, offers: list[Offer]) -> None:
    nodes = [offer(*each) for each in offers]
    none_fits = not any(admits(wanted, each) for each in nodes)
    why, advice = unmet_constraint(wanted, nodes)
    assert bool(why) == bool(advice) == (bool(nodes) and none_fits)


def test_who_names_no_region_runs_anywhere_and_who_names_some_never_where_nobody_says() -> None:
    assert admits(NO_CONSTRAINTS, offer(""))
    assert admits(NO_CONSTRAINTS, offer("eu"))
    assert admits(PlacementConstraints(("eu", "us")), offer("us"))
    assert not admits(PlacementConstraints(("eu",)), offer(""))


def test_a_sandbox_is_had_where_a_node_says_so_and_nowhere_else() -> None:
    gvisor = frozenset({"gvisor"})
    assert admits(PlacementConstraints((), GVISOR), offer("eu", gvisor))
    assert not admits(PlacementConstraints((), GVISOR), offer("eu"))
    assert not admits(PlacementConstraints(("us",), GVISOR), offer("eu", gvisor))


def test_a_node_that_cannot_confine_gets_nothing_and_a_plain_process_no_list() -> None:
    listed = PlacementConstraints(listed=True)
    refusing = replace(offer("", confines="none"), isolation_refused="unshare(CLONE_NEWNS): not permitted")
    assert not admits(NO_CONSTRAINTS, refusing)
    assert admits(PlacementConstraints((), GVISOR), replace(refusing, isolations=frozenset({"gvisor"})))
    assert admits(NO_CONSTRAINTS, offer("", confines="plain"))
    assert not admits(listed, offer("", confines="plain"))

    why, advice = unmet_constraint(NO_CONSTRAINTS, [refusing])
    assert why == "its workers need namespaces, which the node has not: unshare(CLONE_NEWNS): not permitted"
    assert "FS_ISOLATION=best-effort" in advice
    why, _ = unmet_constraint(listed, [refusing, offer("", confines="plain")])
    assert why.startswith("its list of what it may reach needs namespaces, which none of 2 nodes has")
    found = make_plan(request(), Cluster([refusing]), 0.0)
    assert found.error is not None
    assert (found.error.code, found.stages) == ("unavailable", [])
    found = make_plan(request(), Cluster([replace(node("a"), confines="none"), node("b", bytes_per_s=1e6)]), 0.0)
    assert {stage.node for stage in found.stages} == {"b"}


@pytest.mark.parametrize(
    ("regions", "nodes", "words"),
    [
        ((), [offer("")], "it asks for isolation gvisor, which the node has not"),
        ((), [offer(""), offer("eu")], "it asks for isolation gvisor, which none of 2 nodes has"),
        (("eu",), [offer("", frozenset({"gvisor"})), offer("eu")], "isolation gvisor, which the node in eu has not"),
        (("us",), [offer("eu", frozenset({"gvisor"}))], "it may run in us, and no node is there"),
    ],
)
def test_what_is_lacking_is_said(regions: tuple[str, ...], nodes: list[NodeState], words: str) -> None:
    why, _ = unmet_constraint(PlacementConstraints(regions, GVISOR), nodes)
    assert words in why


def test_each_sandbox_has_its_own_advice() -> None:
    hints = {
        isolation: unmet_constraint(PlacementConstraints((), isolation), [offer("")])[1]
        for isolation in get_args(Isolation)
        if isolation != "namespaces"
    }
    assert "runsc" in hints["gvisor"]
    assert "FS_CONTAINER_ENGINE" in hints["container"]


def test_a_node_without_torch_gets_no_model_and_one_that_does_not_say_may() -> None:
    wanted = PlacementConstraints(pool="torch")
    assert admits(wanted, offer("", pools=frozenset({"python", "torch"})))
    assert admits(wanted, offer("")), "a node of an earlier release"
    plain = offer("", pools=frozenset({"python"}))
    assert not admits(wanted, plain)
    assert unmet_constraint(wanted, [plain])[0] == "its workers need torch, which the node has not"
    nodes = [node("plain", pools=frozenset({"python"})), node("torch", pools=frozenset({"torch"}), bytes_per_s=1e6)]
    assert names(make_plan(request(wanted=wanted), Cluster(nodes), 0.0)) == ["torch"], "though it is slower"


def test_packages_for_another_python_go_to_no_node_of_this_one() -> None:
    new, old = "cpython-312 on linux-x86_64", "cpython-311 on linux-x86_64"
    wanted = PlacementConstraints(runs=new)
    assert admits(wanted, node("n")), "a node of an earlier release does not say"
    nodes = [node("old", runs=old), node("new", runs=new, bytes_per_s=1e6)]
    assert names(make_plan(request(wanted=wanted), Cluster(nodes), 0.0)) == ["new"]
    why, advice = unmet_constraint(wanted, nodes[:1])
    assert why == f"its packages were built for {new}, and nodes run {old}"
    assert "Python" in advice


def test_a_cache_that_does_not_fit_needs_a_gpu() -> None:
    wanted = PlacementConstraints(gpu=True)
    nodes = [node("cpu"), node("gpu", gpus=1, bytes_per_s=1e6)]
    assert names(make_plan(request(wanted=wanted, kv_bytes=10**12), Cluster(nodes), 0.0)) == ["gpu"]
    why, advice = unmet_constraint(wanted, nodes[:1])
    assert "it needs a GPU, which the node has not" in why
    assert "kv_memory" in advice


@pytest.mark.parametrize(
    ("regions", "words"),
    [
        (["us"], "1 node is in us"),
        (["us", "us", "", "asia"], "2 nodes are in us, 1 in asia, 1 in no region"),
        ([""], "1 node is in no region"),
    ],
)
def test_it_is_said_where_nodes_are(regions: list[str], words: str) -> None:
    assert region_counts(regions) == words
    why, _ = unmet_constraint(PlacementConstraints(("eu", "moon")), [offer(region) for region in regions])
    assert why == f"it may run in eu or moon, and no node is there: {words}"


def test_a_pipeline_stays_in_its_region_though_the_others_are_quicker() -> None:
    nodes = [node(f"eu{index}", region="eu", bytes_per_s=50e6) for index in range(2)]
    nodes += [node(f"us{index}", region="us") for index in range(4)]
    found = make_plan(
        request(measures=measured(prefill_s=0.0), wanted=PlacementConstraints(("eu",))), Cluster(nodes), 0.0
    )
    assert names(found) == ["eu0", "eu1"]
    said = format_explanation(explain(found, ObservedStart()))
    assert "it may run in eu" in said
    assert "eu0 (eu)" in said


def test_the_roomiest_is_of_the_region() -> None:
    nodes = [node("big", region="us"), node("small", region="eu", free_bytes=10)]
    found = make_plan(request(wanted=PlacementConstraints(("eu",))), Cluster(nodes), 0.0)
    assert found.error is not None
    assert "the roomiest node in eu small has 0 of" in found.error.message
    assert msgspec.json.encode(found)
