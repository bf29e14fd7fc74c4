"""Functions that name regions: planned on the nodes there as if there were no others."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.planner import Cluster, plan
from fleetstart.controller.planner.explain import Outcome, explained, text
from fleetstart.controller.planner.regions import admits, lack, where
from fleetstart.runtime.contract.function import SLO
from tests.controller.planner.worlds import clusters, measured, names, node, request

REGIONS = st.sampled_from(["", "eu", "us", "asia"])
WANTED = st.lists(st.sampled_from(["eu", "us", "asia", "moon"]), max_size=3, unique=True)


@given(
    clusters(least=1),
    st.lists(REGIONS, min_size=7, max_size=7),
    WANTED,
    st.none() | st.floats(0.5, 9.0).map(lambda ttft_s: SLO(ttft_s=ttft_s)),
    st.integers(1, 4),
)
def test_a_plan_is_that_of_the_nodes_that_fit_and_of_no_others(
    cluster: Cluster, regions: list[str], wanted: list[str], slo: SLO | None, workers: int
) -> None:
    placed = [replace(state, region=region) for state, region in zip(cluster, regions, strict=False)]
    fitting = [state for state in placed if admits(wanted, state.region)]
    asked = request(slo=slo, workers=workers, most=workers)

    found = plan(replace(asked, regions=tuple(wanted)), Cluster(placed), 0.0)
    alone = plan(asked, Cluster(fitting), 0.0)

    assert {stage.region for stage in found.stages} <= (set(wanted) or set(regions))
    assert found.stages == alone.stages
    assert found.regions == wanted
    if fitting:
        assert found.considered == alone.considered
    else:
        assert found.error is not None
        assert lack(wanted, [state.region for state in placed]) in found.error.message


@given(WANTED, st.lists(REGIONS, max_size=5))
def test_there_is_a_lack_where_nodes_are_and_none_fits(wanted: list[str], regions: list[str]) -> None:
    none_fits = not any(admits(wanted, region) for region in regions)
    assert bool(lack(wanted, regions)) == (bool(regions) and none_fits)


def test_who_names_no_region_runs_anywhere_and_who_names_some_never_where_nobody_says() -> None:
    assert admits([], "")
    assert admits([], "eu")
    assert admits(["eu", "us"], "us")
    assert not admits(["eu"], "")


@pytest.mark.parametrize(
    ("regions", "words"),
    [
        (["us"], "1 node is in us"),
        (["us", "us", "", "asia"], "2 nodes are in us, 1 in asia, 1 in no region"),
        ([""], "1 node is in no region"),
    ],
)
def test_it_is_said_where_nodes_are(regions: list[str], words: str) -> None:
    assert where(regions) == words
    assert lack(["eu", "moon"], regions) == f"it may run in eu or moon, and no node is there: {words}"


def test_a_pipeline_stays_in_its_region_though_the_others_are_quicker() -> None:
    nodes = [node(f"eu{index}", region="eu", bytes_per_s=50e6) for index in range(2)]
    nodes += [node(f"us{index}", region="us") for index in range(4)]
    found = plan(request(measures=measured(prefill_s=0.0), regions=("eu",)), Cluster(nodes), 0.0)
    assert names(found) == ["eu0", "eu1"]
    said = text(explained(found, Outcome()))
    assert "it may run in eu" in said
    assert "eu0 (eu)" in said


def test_the_roomiest_is_of_the_region() -> None:
    nodes = [node("big", region="us"), node("small", region="eu", free_bytes=10)]
    found = plan(request(regions=("eu",)), Cluster(nodes), 0.0)
    assert found.error is not None
    assert "the roomiest node in eu small has 0 of" in found.error.message
    assert msgspec.json.encode(found)
