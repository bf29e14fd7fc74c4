"""Groups of nodes that have the model in their memory together: they start without a fetch, and are taken for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.planner.checkpoint_layout import EVERY_LAYER, layer_set
from fleetstart.controller.planner.cluster import Cluster
from fleetstart.controller.planner.node_state import HeldLayers
from fleetstart.controller.planner.selection import make_plan
from fleetstart.runtime.contract.function.spec import SLO
from tests.controller.planner.worlds import MB, measured, names, node, request


def in_parts(*ends: int) -> Cluster:
    """Nodes that have layers up to these ends, one after the other, and one that is free and has none."""
    parts = zip((0, *ends), ends, strict=False)
    held = [HeldLayers(host=layer_set(first, end)) for first, end in parts]
    return Cluster([node("new"), *(node(f"n{index}", holds=layers) for index, layers in enumerate(held))])


@pytest.mark.parametrize("ends", [(2, 4, 6, 8), (3, 4, 6, 8), (1, 8), (5, 8), (1, 2, 3, 4, 5, 8)])
@pytest.mark.parametrize("slo", [None, SLO(ttft_s=0.3)])
def test_what_nodes_have_together_starts_at_once(ends: tuple[int, ...], slo: SLO | None) -> None:
    found = make_plan(request(slo=slo), in_parts(*ends), 0.0)
    assert names(found) == [f"n{index}" for index in range(len(ends))]
    assert [stage.end for stage in found.stages] == list(ends)
    assert [stage.missing_bytes for stage in found.stages] == [0] * len(ends)
    assert found.ttft_s == pytest.approx(0.1, abs=1e-5), "the prefill; a single worker takes 4.1 s"
    assert found.whole_s > 0


def test_a_group_must_beat_a_fetch() -> None:
    slow_hops = request(measures=measured(hop_s=3.0))
    assert len(make_plan(slow_hops, in_parts(3, 8), 0.0).stages) == 1
    quick_link = Cluster([*in_parts(3, 8), node("quick", bytes_per_s=100_000.0 * MB)])
    assert names(make_plan(request(), quick_link, 0.0)) == ["quick"]


def test_whole_copies_are_loaded_onto_several_gpus_in_parts() -> None:
    """λScale section 5: of four nodes with all in memory each loads a quarter, and serves until it has the rest."""
    copies = {"holds": HeldLayers(host=EVERY_LAYER), "device_bytes_per_s": 100.0 * MB}
    found = make_plan(request(), Cluster(node(f"n{index}", gpus=1, **copies) for index in range(4)), 0.0)
    assert len(found.stages) == 4
    assert found.ttft_s == pytest.approx(1.1)
    cpus = Cluster(node(f"n{index}", **copies) for index in range(4))
    on_cpus = make_plan(request(measures=measured(library_s=9.0)), cpus, 0.0)
    assert len(on_cpus.stages) == 1


@given(st.lists(st.integers(0, 255), min_size=2, max_size=6))
def test_a_warm_group_uses_each_node_once_and_has_every_layer_once(held: list[int]) -> None:
    cluster = Cluster(node(f"n{index}", holds=HeldLayers(host=layers)) for index, layers in enumerate(held))
    found = make_plan(request(), cluster, 0.0)
    cuts = [(stage.first, stage.end) for stage in found.stages]
    assert [cuts[0][0], *(end for _, end in cuts)] == [*(first for first, _ in cuts), 8]
    assert len(set(names(found))) == len(cuts)
