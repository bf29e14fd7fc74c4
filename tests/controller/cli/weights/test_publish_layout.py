"""Laws of the layout, for any model: in order of use, aligned, inside one part, valid for every other tool."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import deserialize

from fleetstart.controller.cli.weights.local_files import LocalFile
from fleetstart.controller.cli.weights.publish import checksums, read_data
from fleetstart.controller.cli.weights.publish_layout import (
    CHUNK_LEAST_BYTES,
    CHUNKS_LEAST,
    PAD_PREFIX,
    TOGETHER_PARTS,
    CheckpointPlan,
    chunk_size,
    layer_of_tensors,
    plan_checkpoint,
)
from fleetstart.controller.cli.weights.safetensors_header import StoredTensor, read_file
from fleetstart.controller.cli.weights.source import SmallFile, Source
from fleetstart.runtime.contract.errors import CheckpointInvalid
from fleetstart.runtime.contract.weights.manifest import (
    ALIGNMENT_BYTES,
    CHUNK_BYTES,
    LAYER_BEFORE,
    chunk_ranges,
    manifest_bytes,
    read_manifest,
)
from tests.controller.cli.checkpoints import Tensor, encode, tensor

CHUNK = 4096
PART_MAX = 3 * CHUNK


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.embed_tokens.weight", LAYER_BEFORE),
        ("embeddings.word_embeddings.weight", LAYER_BEFORE),
        ("transformer.wte.weight", LAYER_BEFORE),
        ("transformer.wpe.weight", LAYER_BEFORE),
        ("model.layers.0.mlp.weight", 0),
        ("model.layers.11.mlp.weight", 11),
        ("encoder.layer.5.attention.self.key.bias", 5),
        ("h.3.attn", 3),
        ("blocks.7.norm1.weight", 7),
        ("model.norm.weight", 12),
        ("lm_head.weight", 12),
        ("pooler.dense.weight", 12),
    ],
)
def test_the_layer_of_a_name(name: str, layer: int) -> None:
    assert layer_of_tensors([name, "model.layers.11.x"])[name] == layer


def test_a_model_without_layers_has_one() -> None:
    assert layer_of_tensors(["a.weight", "embed.weight"]) == {"a.weight": 0, "embed.weight": LAYER_BEFORE}


@given(st.integers(0, 1 << 44))
def test_chunks_are_as_large_as_they_can_be_while_there_are_enough_of_them(total_bytes: int) -> None:
    size = chunk_size(total_bytes)
    assert CHUNK_LEAST_BYTES <= size <= CHUNK_BYTES
    assert size & (size - 1) == 0
    assert size == CHUNK_LEAST_BYTES or total_bytes // size >= CHUNKS_LEAST
    assert size == CHUNK_BYTES or total_bytes // (2 * size) < CHUNKS_LEAST


def test_the_chunks_of_a_small_chat_model() -> None:
    assert chunk_size(269_060_552) == 1 << 20


DTYPES = st.sampled_from(["F32", "F16", "U8", "BF16", "I64", "BOOL"])
NAMES = st.one_of(
    st.from_regex(r"(model\.)?layers\.[0-9]{1,2}\.[a-c]", fullmatch=True),
    st.from_regex(r"(embed|norm|head|[a-zé])[a-d]?\.[a-c]", fullmatch=True),
)
TENSORS = st.dictionaries(
    NAMES,
    st.builds(
        lambda shape, dtype, seed: tensor(*shape, dtype=dtype, seed=seed),
        st.lists(st.integers(0, 40), max_size=3),
        DTYPES,
        st.integers(0, 99),
    ),
    min_size=1,
    max_size=12,
).filter(lambda tensors: any(content for _, _, content in tensors.values()))
FILES = st.dictionaries(st.from_regex(r"[a-z]{1,6}\.json", fullmatch=True), st.binary(max_size=300), max_size=3)


def source_of(folder: Path, tensors: dict[str, Tensor], files: dict[str, bytes]) -> Source:
    weights = folder / "m.safetensors"
    weights.write_bytes(encode(tensors))
    small = []
    for name, content in files.items():
        (folder / name).write_bytes(content)
        small.append(SmallFile(name=name, file=LocalFile(folder / name), size_bytes=len(content)))
    return Source(tensors=tuple(read_file(LocalFile(weights)).tensors), files=tuple(small))


def plan_of(source: Source) -> CheckpointPlan:
    return plan_checkpoint(source, part_max_bytes=PART_MAX, chunk_bytes=CHUNK)


@pytest.mark.slow
@given(TENSORS, FILES)
def test_what_was_written_read_back_by_the_manifest_is_bit_identical(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Tensor], files: dict[str, bytes]
) -> None:
    plan = plan_of(source_of(tmp_path_factory.mktemp("weights"), tensors, files))
    sums = checksums(plan, lambda *_: None)
    manifest = read_manifest(manifest_bytes(plan.manifest(sums)))
    names = [part.object for part in manifest.parts]
    objects = {name: part.header + b"".join(read_data(part)) for name, part in zip(names, plan.parts, strict=True)}
    segment = bytearray(manifest.total_bytes)
    for chunk in chunk_ranges(manifest):
        piece = objects[chunk.object][chunk.object_offset :][: chunk.size_bytes]
        segment[chunk.segment_offset : chunk.segment_offset + chunk.size_bytes] = piece
    assert {
        name: (entry.dtype, entry.shape, bytes(segment[entry.offset : entry.offset + entry.size_bytes]))
        for name, entry in manifest.tensors.items()
    } == tensors
    assert {
        name: bytes(segment[entry.offset : entry.offset + entry.size_bytes]) for name, entry in manifest.files.items()
    } == files


@pytest.mark.slow
@given(TENSORS, FILES)
def test_every_part_opens_with_the_safetensors_library(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Tensor], files: dict[str, bytes]
) -> None:
    plan = plan_of(source_of(tmp_path_factory.mktemp("weights"), tensors, files))
    found: dict[str, bytes] = {}
    for part in plan.parts:
        assert len(part.header) % 4096 == 0
        for name, value in deserialize(part.header + b"".join(read_data(part))):
            found[name] = bytes(value["data"])
    pads = {name for name in found if name.startswith(PAD_PREFIX)}
    assert all(not any(found[name]) for name in pads)
    assert {name: content for name, content in found.items() if name not in pads} == {
        **{name: content for name, (_, _, content) in tensors.items()},
        **files,
    }


@pytest.mark.slow
@given(TENSORS, FILES)
def test_tensors_are_aligned_and_in_the_order_of_use(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Tensor], files: dict[str, bytes]
) -> None:
    plan = plan_of(source_of(tmp_path_factory.mktemp("weights"), tensors, files))
    entries = list(plan.tensors.values())
    assert all(entry.offset % ALIGNMENT_BYTES == 0 for entry in entries)
    assert [entry.layer for entry in entries] == sorted(entry.layer for entry in entries)
    assert [entry.offset for entry in entries] == sorted(entry.offset for entry in entries)
    sized = [entry for entry in entries if entry.size_bytes]
    assert all(file.offset <= sized[0].offset for file in plan.files.values())
    stored = [entry.offset for entry in sized] + [file.offset for file in plan.files.values() if file.size_bytes]
    for part in plan.parts:
        inside = [offset for offset in stored if 0 <= offset - part.segment_offset < part.data_bytes]
        assert part.data_bytes <= PART_MAX or len(inside) == 1


@pytest.mark.parametrize("width", [3, 7, 30, 130])
def test_projections_of_one_input_lie_one_behind_the_other(tmp_path: Path, width: int) -> None:
    """Their parts are cut before or behind them; those of the last width are too large."""
    sizes = {"q": 4, "k": 2, "v": 2, "o": 4, "gate": 6, "up": 6, "down": 6}
    tensors = {
        f"model.layers.{layer}.{'mlp' if len(name) > 1 else 'self_attn'}.{name}_proj.{kind}": tensor(
            *((16 * size, width) if kind == "weight" else (16 * size,))
        )
        for layer in range(3)
        for name, size in sizes.items()
        for kind in ("weight", "bias")
    }
    plan = plan_of(source_of(tmp_path, tensors, {}))
    assert len(plan.parts) > 1
    for layer in range(3):
        for kind in ("weight", "bias"):
            for group in (("self_attn.k", "self_attn.q", "self_attn.v"), ("mlp.gate", "mlp.up")):
                entries = [plan.tensors[f"model.layers.{layer}.{name}_proj.{kind}"] for name in group]
                if sum(entry.size_bytes for entry in entries) > TOGETHER_PARTS * PART_MAX:
                    assert width == 130
                    continue
                for before, after in itertools.pairwise(entries):
                    assert before.offset + before.size_bytes == after.offset, (layer, group, kind)


@pytest.mark.slow
@given(TENSORS, st.randoms(use_true_random=False), st.integers(1, 3))
@example({"layers.00.a": tensor(4), "layers.0.a": tensor(4)}, random.Random(0), 1)
@example({"layers.0.a": tensor(4), "layers.00.a": tensor(4)}, random.Random(1), 1)
def test_equal_weights_have_equal_plans_however_they_were_stored(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Tensor], chance: random.Random, shards: int
) -> None:
    folder = tmp_path_factory.mktemp("weights")
    names = list(tensors)
    chance.shuffle(names)
    found: list[StoredTensor] = []
    for number in range(shards):
        file = folder / f"{number}.safetensors"
        file.write_bytes(encode({name: tensors[name] for name in names[number::shards]}))
        found.extend(read_file(LocalFile(file)).tensors)
    whole = plan_of(source_of(tmp_path_factory.mktemp("one"), tensors, {}))
    parts = plan_of(Source(tensors=tuple(found), files=()))
    assert whole.manifest(checksums(whole, lambda *_: None)) == parts.manifest(checksums(parts, lambda *_: None))


@pytest.mark.parametrize("tensors", [{}, {"a": tensor(0)}])
def test_weights_without_bytes_are_refused(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    with pytest.raises(CheckpointInvalid, match="no bytes"):
        plan_of(source_of(tmp_path, tensors, {}))


def test_reserved_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match="reserved"):
        plan_of(source_of(tmp_path, {"__pad__.0": tensor(3)}, {}))
