"""LoRA adapters from a folder to a function: refused where somebody can still do something about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fleetstart.controller.cli.weights.publish import publish
from fleetstart.controller.cli.weights.source import read_source
from fleetstart.runtime.contract.errors import CheckpointInvalid, InvalidSpec, PickleRefused, WeightsMissing
from fleetstart.runtime.contract.ids import FunctionName
from fleetstart.runtime.contract.weights.lora import read_adapter, require_fit
from fleetstart.runtime.contract.weights.manifest import FileEntry, Manifest, TensorEntry, read_manifest
from tests.controller.cli.adapters import adapter, config, write_adapter
from tests.controller.cli.checkpoints import MemoryStore, encode, model, no_progress, tensor
from tests.controller.conftest import ControllerProcess

Q = "model.layers.0.q_proj"


def fits(manifest: Manifest) -> None:
    entries = {name: TensorEntry(0, 0, dtype, shape, 0) for name, (dtype, shape, _) in adapter().items()}
    found = read_adapter(json.dumps(config()).encode(), entries.items(), patterns=False)
    require_fit(FunctionName("f"), manifest, found)


def manifest_of(tensors: dict[str, tuple[int, ...]], **more: Any) -> Manifest:
    entries = {name: TensorEntry(0, 0, "F32", shape, 0) for name, shape in tensors.items()}
    return Manifest(total_bytes=0, parts=[], chunks=[], tensors=entries, **more)


def test_an_adapter_fits_a_tensor_or_another_name_of_it() -> None:
    fits(manifest_of({f"{Q}.weight": (6, 4)}))
    fits(manifest_of({"w": (6, 4)}, aliases={f"{Q}.weight": "w"}))


def test_a_misfit_names_the_function() -> None:
    with pytest.raises(InvalidSpec, match=r"function f: the adapter makes \[6, 4\] for module .* is \[4, 6\]") as error:
        fits(manifest_of({f"{Q}.weight": (4, 6)}))
    assert error.value.hint == "was the adapter trained on another model?"


def test_weights_that_are_themselves_an_adapter() -> None:
    with pytest.raises(InvalidSpec, match="which is no model"):
        fits(manifest_of({}, files={"adapter_config.json": FileEntry(0, 0)}))


# ── folders ────────────────────────────────────────────────────────────────────────────────────────


def test_a_folder_in_pefts_format_is_an_adapter_in_the_order_of_layers(tmp_path: Path) -> None:
    tensors = {**adapter(module="model.layers.10.q_proj"), **adapter(module="model.layers.2.q_proj")}
    source = read_source(write_adapter(tmp_path / "lora", tensors))
    assert source.adapter
    store = MemoryStore()
    published = publish(tmp_path / "lora", store, cache=tmp_path / "cache", progress=no_progress)
    manifest = read_manifest(store.objects[f"checkpoints/{published.id}/manifest.json"])
    entries = sorted(manifest.tensors.values(), key=lambda entry: entry.offset)
    assert [entry.layer for entry in entries] == [2, 2, 10, 10]
    assert set(manifest.files) == {"adapter_config.json"}


def test_an_adapter_in_a_pickle_is_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, adapter())
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(PickleRefused, match=r"adapter_model\.bin is a pickle"):
        read_source(folder)
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(WeightsMissing, match=r"no adapter_model\.safetensors"):
        read_source(folder)


def test_an_adapter_beside_a_model_is_ambiguous(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, adapter())
    (folder / "model.safetensors").write_bytes(encode(model()))
    with pytest.raises(CheckpointInvalid, match="holds a LoRA adapter and a model"):
        read_source(folder)


# ── deploy ─────────────────────────────────────────────────────────────────────────────────────────


def upload(controller: ControllerProcess, store: MemoryStore) -> None:
    for key, data in store.objects.items():
        controller.http.put(f"/api/v1/objects/{key}", content=data).raise_for_status()


def test_a_deploy_over_http_checks_adapter_and_base(controller: ControllerProcess, tmp_path: Path) -> None:
    store = MemoryStore()

    def push(folder: Path) -> str:
        return publish(folder, store, cache=tmp_path / "cache", progress=no_progress).id

    file = tmp_path / "base.safetensors"
    file.write_bytes(encode({f"{Q}.weight": tensor(6, 4)}))
    weights, good = push(file), push(write_adapter(tmp_path / "good", adapter()))
    bad = push(write_adapter(tmp_path / "bad", adapter(into=5)))
    upload(controller, store)
    assert controller.deploy("f", weights=weights, adapter=good)["version"] == 1

    def refused(**fields: Any) -> str:
        with pytest.raises(AssertionError) as error:
            controller.deploy("f", **fields)
        return str(error.value)

    assert "makes [6, 5]" in refused(weights=weights, adapter=bad)
    assert "is not in the store" in refused(weights=weights, adapter="0" * 64)
    assert "not a checkpoint" in refused(weights=weights, adapter="../x") or "id" in refused(
        weights=weights, adapter="x"
    )
    assert "has no adapter_config.json" in refused(weights=good, adapter=weights)
    assert "one and the same" in refused(weights=good, adapter=good)
    assert "needs the weights" in refused(adapter=good)
    answer = controller.http.delete(f"/api/v1/checkpoints/{good}")
    assert (answer.status_code, "f@1" in answer.text) == (400, True)

    named: dict[str, Any] = {"weights": weights, "llm": {}}
    assert controller.deploy("g", **named, adapters={"sql": good})["version"] == 1
    answer = controller.http.delete(f"/api/v1/checkpoints/{good}")
    assert (answer.status_code, "g@1" in answer.text) == (400, True)

    assert "function f: adapter sql: the adapter makes [6, 5]" in refused(**named, adapters={"legal": good, "sql": bad})
    whole = {"base_model.model.norm.weight": tensor(4)}
    replacing = push(write_adapter(tmp_path / "whole", adapter() | whole, modules_to_save=["norm"]))
    file.write_bytes(encode({f"{Q}.weight": tensor(6, 4), "norm.weight": tensor(4)}))
    named["weights"] = push(file)
    upload(controller, store)
    named["adapters"] = {"sql": replacing}
    assert "adapter sql replaces norm.weight" in refused(**named | {"llm": {"engine": "vllm"}})
    controller.deploy("h", **named)
