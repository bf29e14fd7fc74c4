"""Packages and volumes of a function in a plan: their fetch is predicted, and a node that has them is preferred."""

from __future__ import annotations

import pytest

from fleetstart.controller.planner.accuracy_report import ObservedStart, explain, format_explanation
from fleetstart.controller.planner.checkpoint_layout import checkpoint_layout
from fleetstart.controller.planner.cluster import Cluster
from fleetstart.controller.planner.node_state import FILES_BYTES_PER_S
from fleetstart.controller.planner.plan import FileTree, PlanRequest
from fleetstart.controller.planner.selection import make_plan
from fleetstart.runtime.contract.ids import LayerId, NodeId
from tests.controller.planner.worlds import MB, measured, names, node, request, taken

PACKAGES = LayerId("a" * 64)
HELD = frozenset({PACKAGES})


def without_weights(packages_bytes: int = 500 * MB) -> PlanRequest:
    return request(
        checkpoint=None,
        layout=checkpoint_layout(None, 0),
        trees=(FileTree(PACKAGES, packages_bytes),),
        measures=measured(library_s=1.0),
    )


def test_the_fetch_of_packages_comes_before_the_imports() -> None:
    plan = make_plan(without_weights(), Cluster([node("n", start_s=0.2, files_bytes_per_s=1000.0 * MB)]), 0.0)
    assert plan.ready_s == pytest.approx(5.0 + 1.0), "100 MB/s from the store, then the library"
    assert plan.stages[0].files_bytes == 500 * MB
    assert plan.stages[0].fetch_s == pytest.approx(5.0)
    assert "477 MiB" in format_explanation(explain(plan, ObservedStart()))


def test_a_node_that_writes_slowly_is_predicted_by_what_it_writes() -> None:
    plan = make_plan(without_weights(), Cluster([node("n", bytes_per_s=1e9, files_bytes_per_s=50.0 * MB)]), 0.0)
    assert plan.ready_s == pytest.approx(10.0 + 1.0)
    assert FILES_BYTES_PER_S < 1e9


def test_packages_share_the_link_with_weights() -> None:
    wanted = request(trees=(FileTree(PACKAGES, 100 * MB),))
    assert make_plan(wanted, Cluster([node("n")]), 0.0).ready_s == pytest.approx((400 + 100) / 100)
    assert make_plan(wanted, Cluster([node("n", trees=HELD)]), 0.0).ready_s == pytest.approx(4.0)


def test_a_node_that_has_the_packages_is_preferred_to_a_faster_link() -> None:
    cluster = Cluster([node("fast", bytes_per_s=400.0 * MB), node("has-them", trees=HELD)])
    plan = make_plan(without_weights(), cluster, 0.0)
    assert names(plan) == ["has-them"]
    assert (plan.stages[0].files_bytes, plan.stages[0].fetch_s) == (0, 0.0)
    assert plan.ready_s == pytest.approx(1.0)


def test_it_is_found_among_many_that_are_faster() -> None:
    others = [node(f"n{number:02}", bytes_per_s=400.0 * MB) for number in range(40)]
    assert names(make_plan(without_weights(), Cluster([*others, node("zz", trees=HELD)]), 0.0)) == ["zz"]


def test_what_a_node_lacks_of_packages_and_volumes_is_fetched() -> None:
    volume = FileTree(LayerId("b" * 64), 300 * MB)
    wanted = request(checkpoint=None, layout=checkpoint_layout(None, 0), trees=(FileTree(PACKAGES, 500 * MB), volume))
    [stage] = make_plan(wanted, Cluster([node("n", trees=HELD)]), 0.0).stages
    assert stage.files_bytes == 300 * MB
    assert stage.fetch_s == pytest.approx(3.0)
    cluster = Cluster([*(node(f"n{number:02}") for number in range(40)), node("zz", trees=frozenset({volume.id}))])
    assert names(make_plan(wanted, cluster, 0.0)) == ["zz"], "500 MB are less than 800"


def test_the_next_start_of_a_step_counts_on_packages_that_the_one_before_brings() -> None:
    wanted, cluster = without_weights(), Cluster([node("a"), node("b")])
    first = make_plan(wanted, cluster, 0.0)
    taken(first, cluster, wanted, 0.0)
    assert PACKAGES in cluster[first.stages[0].node].trees
    for name in ("a", "b"):
        cluster.drop(NodeId(name))
    assert cluster.with_trees(wanted.trees, 0, 0.0) == []
