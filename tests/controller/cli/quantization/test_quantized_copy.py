"""`fs weights quantize` writes a whole copy, or nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fleetstart.controller.cli.root import run
from fleetstart.controller.cli.weights.source import read_source
from tests.runtime.llm.models import Checkpoint, in_int8, tiny


def saved(folder: Path, weights: Checkpoint) -> Path:
    folder.mkdir()
    save_file(dict(weights), folder / "model.safetensors")
    for name in weights.names():
        (folder / name).write_bytes(weights.file(name))
    return folder


def loaded(folder: Path) -> Checkpoint:
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".safetensors"}
    return Checkpoint(load_file(folder / "model.safetensors"), files)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_layers_matrices_are_in_int8_and_all_else_is_as_it_was(
    dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tiny(dtype=dtype)
    assert run(["weights", "quantize", str(saved(tmp_path / "model", weights)), str(tmp_path / "new"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    copy = loaded(tmp_path / "new")
    wanted = in_int8(weights)
    assert copy.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert copy[name].dtype == tensor.dtype
        assert torch.equal(copy[name], tensor)
    assert said["matrices"] == 21
    assert said["stored_bytes"] == sum(tensor.nbytes for tensor in weights.values())
    assert said["weight_bytes"] == sum(tensor.nbytes for tensor in copy.values()) < said["stored_bytes"]
    assert sorted(said["files"]) == sorted(str(path) for path in (tmp_path / "new").iterdir())
    assert {name: copy.file(name) for name in copy.names() if name != "config.json"} == {
        name: weights.file(name) for name in weights.names() if name != "config.json"
    }


def test_shards_become_one_file(tmp_path: Path) -> None:
    weights = tiny()
    folder = saved(tmp_path / "model", weights)
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for shard, some in shards.items():
        save_file({name: weights[name] for name in some}, folder / shard)
    index = {"weight_map": {name: shard for shard, some in shards.items() for name in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert run(["weights", "quantize", str(folder), str(tmp_path / "new")]) == 0
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted([*weights.names(), "model.safetensors"])
    assert len(read_source(tmp_path / "new").tensors) == len(weights) + 21


def _spoilt(weights: Checkpoint, name: str, tensor: Tensor) -> Checkpoint:
    return Checkpoint({**weights, name: tensor}, {one: weights.file(one) for one in weights.names()})


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "config.json").unlink(), "the model has no config.json"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "bert"}'), "'bert' is not supported"),
        (
            lambda folder: save_file(
                dict(_spoilt(tiny(), "model.layers.2.mlp.up_proj.weight", torch.full((96, 64), torch.inf))),
                folder / "model.safetensors",
            ),
            "model.layers.2.mlp.up_proj.weight has numbers that are not finite",
        ),
        (
            lambda folder: save_file({"model.norm.weight": torch.ones(64)}, folder / "model.safetensors"),
            "no matrix in fp32, fp16 or bf16 in any layer",
        ),
    ],
    ids=["no config", "another family", "infinity", "no matrix"],
)
def test_what_cannot_be_quantised_is_refused_and_nothing_is_left(
    spoil: Callable[[Path], object], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path / "model", tiny())
    spoil(folder)
    assert run(["weights", "quantize", str(folder), str(tmp_path / "new")]) != 0
    assert said in capsys.readouterr().err
    assert not list((tmp_path / "new").glob("*"))


def test_a_copy_is_not_quantised_again_nor_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(tmp_path / "model", tiny())
    assert run(["weights", "quantize", str(folder), str(tmp_path / "new")]) == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    assert run(["weights", "quantize", str(tmp_path / "new"), str(tmp_path / "again")]) != 0
    assert "quantised already" in capsys.readouterr().err
    assert run(["weights", "quantize", str(folder), str(tmp_path / "new")]) != 0
    assert "is not empty" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()} == before
