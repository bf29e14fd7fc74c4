"""Sets of layers and what they weigh."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.planner.checkpoint_layout import EVERY_LAYER, CheckpointLayout, checkpoint_layout, layer_set
from fleetstart.runtime.contract.weights.stage import LayerLayout

layouts = st.builds(LayerLayout, st.integers(0, 500), st.lists(st.integers(1, 100), min_size=1, max_size=10))


@given(layouts, st.data())
def test_the_stages_of_a_cut_weigh_the_model(layout: LayerLayout, data: st.DataObject) -> None:
    shape = CheckpointLayout(layout)
    cuts = shape.cuts(data.draw(st.integers(1, shape.count)))
    assert sum(cut.size_bytes for cut in cuts) == shape.total_bytes == shape.size_bytes(EVERY_LAYER)
    assert abs(sum(cut.share for cut in cuts) - 1) < 1e-9
    for cut in cuts:
        assert shape.size_bytes(cut.layers) == cut.size_bytes


@given(layouts, st.integers(0, 1023), st.integers(0, 1023))
def test_sets_weigh_what_their_parts_weigh(layout: LayerLayout, one: int, other: int) -> None:
    shape = CheckpointLayout(layout)
    together = shape.size_bytes(one | other) + shape.size_bytes(one & other)
    assert together == shape.size_bytes(one) + shape.size_bytes(other)


def test_chunks_are_layers_only_when_all_of_them_are_there() -> None:
    shape = CheckpointLayout(LayerLayout(7, [1, 1, 1], [(1, 3), (2, 5), (5, 6)], [(0, 2), (6, 7)]))
    assert shape.layers_in([(0, 7)]) == layer_set(0, 3)
    assert shape.layers_in([(2, 5)]) == layer_set(1, 2)
    assert shape.layers_in([(3, 5), (0, 3)]) == layer_set(1, 2), (
        "the end of the model is missing, and it is the first's"
    )
    assert shape.layers_in([(0, 3), (6, 7)]) == layer_set(0, 1)
    assert shape.layers_in([(2, 4), (4, 6)]) == layer_set(1, 3), "ranges may touch"
    assert shape.layers_in([]) == 0
    assert CheckpointLayout(LayerLayout(7, [1])).layers_in([(0, 9)]) == 0, "nobody said where the layers lie"


def test_a_version_without_layout_is_one_piece() -> None:
    whole = checkpoint_layout(None, 400)
    assert (whole.count, whole.total_bytes, whole.cuts(1)[0].layers) == (1, 400, 1)
    assert checkpoint_layout(LayerLayout(400, []), 0).count == 1
