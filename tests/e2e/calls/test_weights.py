"""Weights from a folder on a user's disk to a tensor in a worker and back, through `fs` and a whole system."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file, save_file

from tests.e2e.systems import System, running

HANDLER = """
from fleetstart.runtime import function

@function(weights="./base", adapter="./lora", memory="512MiB")
class Adapted:
    def load(self, weights):
        import torch
        self.sums = {name: tensor.double().sum().item() for name, tensor in weights.items()}

    def __call__(self):
        return self.sums
"""
SIZE, RANK = 512, 4


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with running() as system:
        yield system


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base in two shards with tied weights, and a LoRA adapter of one of its matrices."""
    folder = tmp_path_factory.mktemp("weights")
    generator = torch.Generator().manual_seed(1)
    base, lora = folder / "base", folder / "lora"
    base.mkdir()
    lora.mkdir()
    embedding = torch.randn(4 * SIZE, SIZE, generator=generator).to(torch.bfloat16)
    shards = {
        "model-00001-of-00002.safetensors": {"model.embed_tokens.weight": embedding},
        "model-00002-of-00002.safetensors": {
            "model.layers.0.mlp.up.weight": torch.randn(SIZE, SIZE, generator=generator),
            "model.layers.0.mask": torch.arange(64) % 3 == 0,
            "lm_head.weight": embedding.clone(),
        },
    }
    index = {name: file for file, tensors in shards.items() for name in tensors}
    for file, tensors in shards.items():
        save_file(tensors, base / file, metadata={"format": "pt"})
    (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (base / "config.json").write_text("{}")
    prefix = "base_model.model.model.layers.0.mlp.up"
    adapter = {
        f"{prefix}.lora_A.weight": torch.randn(RANK, SIZE, generator=generator),
        f"{prefix}.lora_B.weight": torch.randn(SIZE, RANK, generator=generator),
    }
    save_file(adapter, lora / "adapter_model.safetensors", metadata={"format": "pt"})
    (lora / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["up"]})
    )
    (folder / "handler.py").write_text(HANDLER)
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def test_a_function_gets_its_base_with_the_adapter_applied(system: System, folder: Path) -> None:
    (deployed,) = system.deploy_file(folder / "handler.py")
    expected = {name: tensor.double().sum().item() for name, tensor in tensors_of(folder / "base").items()}
    (a, b) = tensors_of(folder / "lora").values()
    expected["model.layers.0.mlp.up.weight"] += 2.0 * (b.double() @ a.double()).sum().item()

    assert system.ok(deployed["name"]) == pytest.approx(expected, rel=1e-3, abs=1e-2)

    listed = json.loads(system.fs("weights", "ls", "--json").out)
    used = [entry for entry in listed if entry["used_by"]]
    assert len(used) == 2, "base and adapter are checkpoints of their own"


def test_what_was_pushed_is_verified_exported_bit_by_bit_and_removed(
    system: System, folder: Path, tmp_path: Path
) -> None:
    checkpoint = system.fs("weights", "push", str(folder / "base")).out.strip()
    assert system.fs("weights", "push", str(folder / "base")).out.strip() == checkpoint
    system.fs("weights", "verify", checkpoint)

    system.fs("weights", "export", checkpoint, str(tmp_path / "back"))

    source, back = tensors_of(folder / "base"), tensors_of(tmp_path / "back")
    assert back.keys() == source.keys()
    for name, tensor in source.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert (tmp_path / "back" / "config.json").read_text() == "{}"


def test_weights_in_use_stay_and_others_go(system: System, folder: Path) -> None:
    (deployed,) = system.deploy_file(folder / "handler.py")
    checkpoint = system.fs("weights", "push", str(folder / "base")).out.strip()
    refused = system.fs("weights", "rm", checkpoint, "--yes", code=1)
    assert deployed["name"] in refused.err

    system.fs("rm", deployed["name"], "--yes")
    system.fs("weights", "rm", checkpoint, "--yes")

    assert checkpoint not in system.fs("weights", "ls", "--json").out
    assert system.fs("weights", "verify", checkpoint, code=3).err
