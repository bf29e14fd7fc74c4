"""Stages of a checkpoint: cuts that balance, and the chunks that each needs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract.weights.manifest import FileEntry, Manifest, Part, TensorEntry
from fleetstart.runtime.contract.weights.stage import LayerLayout, cut, layout_of, stage_bytes, stage_chunks

CHUNK_BYTES = 4096


def manifest_of(layers: int, *, layer_bytes: int, embedding_bytes: int) -> Manifest:
    """A small file, an embedding, layers of one tensor each, and a norm."""
    tensors: dict[str, TensorEntry] = {}
    offset = 64
    sizes = [("model.embed_tokens.weight", embedding_bytes, -1)]
    sizes += [(f"model.layers.{layer}.mlp.weight", layer_bytes, layer) for layer in range(layers)]
    sizes += [("model.norm.weight", 64, layers)]
    for name, size_bytes, layer in sizes:
        tensors[name] = TensorEntry(offset, size_bytes, "U8", (size_bytes,), layer)
        offset += -(-size_bytes // 64) * 64
    total = -(-offset // CHUNK_BYTES) * CHUNK_BYTES
    return Manifest(
        chunk_bytes=CHUNK_BYTES,
        total_bytes=total,
        parts=[Part("part-0", 4096, offset, 0)],
        chunks=[0] * (total // CHUNK_BYTES),
        tensors=tensors,
        files={"config.json": FileEntry(0, 60)},
    )


layouts = st.builds(LayerLayout, st.integers(0, 1000), st.lists(st.integers(1, 100), min_size=1, max_size=9))


@given(layouts, st.data())
def test_a_cut_tiles_the_layers_and_none_is_better(layout: LayerLayout, data: st.DataObject) -> None:
    layers = len(layout.layer_bytes)
    count = data.draw(st.integers(1, layers))

    cuts = cut(layout, count)

    assert [first for first, _ in cuts] == [0, *(end for _, end in cuts[:-1])]
    assert cuts[-1][1] == layers
    assert all(first < end for first, end in cuts)
    largest = max(stage_bytes(layout, *one) for one in cuts)
    for inner in itertools.combinations(range(1, layers), count - 1):
        bounds = [0, *inner, layers]
        assert largest <= max(stage_bytes(layout, *one) for one in itertools.pairwise(bounds))


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="2 layers"):
        cut(LayerLayout(1, [1, 1]), 3)


@given(st.integers(1, 8), st.integers(1, 5000), st.integers(0, 20_000), st.data())
def test_the_chunks_of_all_stages_are_all_chunks(
    layers: int, layer_bytes: int, embedding: int, data: st.DataObject
) -> None:
    manifest = manifest_of(layers, layer_bytes=layer_bytes, embedding_bytes=embedding)
    layout = layout_of(manifest)
    count = data.draw(st.integers(1, layers))

    stages = [stage_chunks(manifest, *one) for one in cut(layout, count)]

    assert set().union(*stages) == set(range(len(manifest.chunks)))
    assert layout.total_bytes == manifest.weight_bytes + 60
    assert all(0 in stage for stage in stages), "every stage reads config.json"


@given(st.integers(1, 8), st.integers(1, 5000), st.integers(0, 20_000))
def test_a_layout_says_in_which_chunks_each_layer_lies(layers: int, layer_bytes: int, embedding: int) -> None:
    manifest = manifest_of(layers, layer_bytes=layer_bytes, embedding_bytes=embedding)
    layout = layout_of(manifest)
    for layer, (begin, end) in enumerate(layout.layer_chunks):
        more = [range(*ends) for ends in layout.ends_chunks] if layer == 0 else [range(1)]
        assert set(range(begin, end)).union(*more) == set(stage_chunks(manifest, layer, layer + 1))


def test_a_later_stage_needs_neither_embedding_nor_head() -> None:
    manifest = manifest_of(4, layer_bytes=CHUNK_BYTES, embedding_bytes=10 * CHUNK_BYTES - 64)

    assert stage_chunks(manifest, 2, 4) == [0, 12, 13]
    assert stage_chunks(manifest, 0, 1) == [*range(11), 14]
