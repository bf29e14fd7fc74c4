"""A published checkpoint as vLLM's load format reads it: from the store's folder, verified."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import save_file

from fleetstart.controller.cli.weights.publish import publish
from fleetstart.runtime.contract.errors import CheckpointInvalid, ChecksumMismatch
from fleetstart.runtime.llm.vllm_engine.checkpoint_folder import CheckpointFolder
from fleetstart.runtime.llm.vllm_engine.load_format import offering, source
from tests.controller.cli.checkpoints import MemoryStore, no_progress

TENSORS = {
    "model.embed_tokens.weight": torch.randn(7, 3),
    "model.layers.0.mlp.weight": torch.randn(5, 3).to(torch.bfloat16),
    "model.layers.1.mlp.weight": torch.arange(11, dtype=torch.int64),
    "model.norm.weight": torch.zeros(0, 4),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The folder of a checkpoint, as a store that is a folder has it."""
    weights = tmp_path / "weights"
    weights.mkdir()
    save_file(TENSORS, weights / "model.safetensors")
    (weights / "config.json").write_text("{}")
    store = MemoryStore()
    published = publish(weights, store, cache=tmp_path / "cache", progress=no_progress)
    for key, content in store.objects.items():
        path = tmp_path / "store" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "store/checkpoints" / published.id


def test_tensors_are_those_that_were_published(checkpoint: Path) -> None:
    found = CheckpointFolder(checkpoint)
    assert set(found) == set(TENSORS)
    assert len(found) == len(TENSORS)
    assert list(found)[0] == "model.embed_tokens.weight"  # noqa: RUF015  # the order of use
    assert all(
        torch.equal(tensor, TENSORS[name]) and tensor.dtype == TENSORS[name].dtype for name, tensor in found.items()
    )


def test_a_write_changes_no_file(checkpoint: Path) -> None:
    name = "model.embed_tokens.weight"
    CheckpointFolder(checkpoint)[name].zero_()
    assert torch.equal(CheckpointFolder(checkpoint)[name], TENSORS[name])


def test_bytes_that_were_not_published_are_refused(checkpoint: Path) -> None:
    part = next(checkpoint.glob("*.safetensors"))
    data = bytearray(part.read_bytes())
    data[CheckpointFolder(checkpoint).manifest.parts[0].header_bytes] ^= 1
    part.write_bytes(data)
    with pytest.raises(ChecksumMismatch, match=r"chunk 0 of .* expected, .* read"):
        CheckpointFolder(checkpoint)["model.embed_tokens.weight"]
    part.write_bytes(data[:-1])
    with pytest.raises(CheckpointInvalid, match=rf"has {len(data) - 1} bytes, {len(data)} are published"):
        CheckpointFolder(checkpoint)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match="has no manifest"):
        CheckpointFolder(tmp_path)


def test_a_worker_s_weights_come_before_a_folder_s(checkpoint: Path) -> None:
    offered = {"a": torch.ones(1)}
    with offering(offered), source({"checkpoint": str(checkpoint)}) as found:
        assert found is offered
    with source({"checkpoint": str(checkpoint)}) as found:
        assert set(found) == set(TENSORS)
    with pytest.raises(ValueError, match="needs a checkpoint of `fs weights ls`"), source({}):
        pass
