"""Equal tensors are found wherever they lie, and only equal ones."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.cli.weights.local_files import GeneratedFile
from fleetstart.controller.cli.weights.publish import publish
from fleetstart.controller.cli.weights.safetensors_header import read_file
from fleetstart.controller.cli.weights.source import read_source
from fleetstart.controller.cli.weights.tied_tensors import SAMPLE_BYTES, TIED_MIN_BYTES, find_tied
from fleetstart.runtime.contract.weights.manifest import read_manifest
from tests.controller.cli.checkpoints import MemoryStore, Tensor, encode, model, no_progress, write_model

CONTENTS = st.sampled_from([b"aaaa", b"aaab", b"bbbb", b"", b"aaaaaaaa"])
TENSORS = st.dictionaries(
    st.from_regex(r"(embed|layers\.[0-3]\.w|lm_head)[a-c]", fullmatch=True),
    st.tuples(CONTENTS, st.sampled_from(["U8", "I8", "F32"])),
    min_size=1,
)


@pytest.mark.slow
@given(TENSORS)
def test_a_tensor_is_tied_to_the_first_equal_one_in_the_order_of_use(contents: dict[str, tuple[bytes, str]]) -> None:
    tensors: dict[str, Tensor] = {
        name: (dtype, (len(data) // (4 if dtype == "F32" else 1),), data) for name, (data, dtype) in contents.items()
    }
    tied = find_tied(read_file(GeneratedFile("m.safetensors", encode(tensors))).tensors, min_bytes=1)
    for name, holder in tied.items():
        assert tensors[name] == tensors[holder]
        assert holder not in tied
    kept = [tensor for name, tensor in tensors.items() if name not in tied and tensor[2]]
    assert len(kept) == len(set(kept)), "nothing is stored twice"
    assert not any(not tensors[name][2] for name in tied), "what has no bytes is no copy"


def test_tensors_that_agree_in_the_middle_alone_are_not_tied() -> None:
    data = os.urandom(4 * SAMPLE_BYTES)
    other = bytes([data[0] ^ 1]) + data[1:]
    tensors: dict[str, Tensor] = {"a": ("U8", (len(data),), data), "b": ("U8", (len(data),), other)}
    assert find_tied(read_file(GeneratedFile("m.safetensors", encode(tensors))).tensors, min_bytes=1) == {}


def test_small_tensors_are_left_as_they_are(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {"a": ("U8", (8,), bytes(8)), "b": ("U8", (8,), bytes(8))}
    assert find_tied(read_source(write_model(tmp_path, tensors)).tensors) == {}


def test_a_tied_head_in_another_shard_is_stored_once(tmp_path: Path) -> None:
    data = os.urandom(TIED_MIN_BYTES)
    tensors: dict[str, Tensor] = {**model()}
    tensors["model.embed_tokens.weight"] = tensors["lm_head.weight"] = ("BF16", (512, 1024), data)
    store = MemoryStore()
    published = publish(
        write_model(tmp_path / "w", tensors, shards=3), store, cache=tmp_path / "cache", progress=no_progress
    )
    manifest = read_manifest(store.objects[f"checkpoints/{published.id}/manifest.json"])
    assert manifest.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in manifest.tensors
    assert sum(map(len, store.objects.values())) < 1.2 * len(data)
    again = publish(tmp_path / "w", store, cache=tmp_path / "cache", progress=no_progress)
    assert again == replace(published, uploaded_bytes=0)
