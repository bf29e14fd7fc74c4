"""Which LoRA adapters can be applied, and to which weights: refused where somebody can still do something about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fleetstart.controller.adapters import MUST_BE_OFF, Adapter, check_fits, read_adapter
from fleetstart.controller.cli.checkpoint import publish
from fleetstart.controller.cli.checkpoint_source import read_source
from fleetstart.runtime.contract.errors import CheckpointInvalid, InvalidSpec, PickleRefused, WeightsMissing
from fleetstart.runtime.contract.ids import FunctionName
from fleetstart.runtime.contract.manifest import FileEntry, Manifest, TensorEntry, read_manifest
from tests.controller.cli.adapters import PREFIX, adapter, config, write_adapter
from tests.controller.cli.checkpoints import MemoryStore, Tensor, encode, model, no_progress, tensor
from tests.controller.conftest import ControllerProcess

Q = "model.layers.0.q_proj"


def read(tensors: dict[str, Tensor], **changes: Any) -> Adapter:
    rows = ((name, (dtype, shape)) for name, (dtype, shape, _) in tensors.items())
    return read_adapter(json.dumps(config(**changes)).encode(), rows)


def base(aliases: dict[str, str] | None = None, **tensors: tuple[int, ...]) -> Manifest:
    entries = {name.replace("__", "."): TensorEntry(0, 0, "F32", shape, 0) for name, shape in tensors.items()}
    return Manifest(total_bytes=0, parts=[], chunks=[], tensors=entries, aliases=aliases or {})


def fits(manifest: Manifest, found: Adapter) -> None:
    check_fits(FunctionName("f"), manifest, found)


def test_an_adapter_as_peft_writes_it() -> None:
    found = read(adapter())
    assert found.factors.keys() == {Q}
    assert not found.whole
    assert read(adapter(), use_rslora=True).config.use_rslora
    assert read(adapter(rank=5), rank_pattern={"q_proj": 5}).factors.keys() == {Q}
    whole = {**adapter(), f"{PREFIX}score.weight": tensor(2, 4), f"{PREFIX}{Q}.base_layer.bias": tensor(6)}
    assert read(whole, bias="all", modules_to_save=["score"]).whole.keys() == {"score.weight", f"{Q}.bias"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', and only LORA"),
        ({"peft_type": None}, "not a LoRA adapter's"),
        ({"r": 0}, "at least 1, r is 0"),
        ({"r": "8"}, "not a LoRA adapter's"),
        ({"r": 10**400}, "rank 2"),
        ({"r": 3}, "has rank 2, adapter_config.json says 3"),
        ({"lora_alpha": None}, "not a LoRA adapter's"),
        ({"target_modules": None}, "not a LoRA adapter's"),
        ({"target_modules": []}, "names no module"),
        ({"target_modules": ["k_proj"]}, f"do not name {Q}"),
        ({"rank_pattern": {"q": 0}}, "at least 1"),
        ({"bias": "some"}, "bias is 'some'"),
        ({"init_lora_weights": "pissa_niter_4"}, "belongs to a base with other weights"),
        *(({name: True}, f"{name} is not applied") for name in MUST_BE_OFF),
    ],
)
def test_settings_that_cannot_be_applied_are_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointInvalid, match=says):
        read(adapter(), **changes)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({}, "no lora_A and lora_B"),
        ({f"{PREFIX}{Q}.lora_A.weight": tensor(2, 4)}, f"{Q} of the adapter has no lora_B"),
        ({f"{PREFIX}{Q}.lora_B.weight": tensor(6, 2)}, f"{Q} of the adapter has no lora_A"),
        ({**adapter(), f"{PREFIX}{Q}.lora_B.weight": tensor(6, 3)}, r"not \[r, in\] and \[out, r\]"),
        ({**adapter(), f"{PREFIX}{Q}.lora_A.weight": tensor(2)}, r"not \[r, in\] and \[out, r\]"),
        ({**adapter(), f"{PREFIX}{Q}.lora_magnitude_vector": tensor(6)}, "of a kind that is not applied"),
        ({**adapter(), f"{PREFIX}embed.lora_embedding_A": tensor(2, 9)}, "of a kind that is not applied"),
        ({**adapter(), "lm_head.weight": tensor(2, 9)}, "does not begin with base_model.model."),
        ({**adapter(), f"{PREFIX}x": tensor(4, dtype="I64")}, "is I64"),
        ({name.replace(".weight", ".default.weight"): one for name, one in adapter().items()}, "not applied"),
    ],
)
def test_tensors_that_cannot_be_applied_are_named(tensors: dict[str, Tensor], says: str) -> None:
    with pytest.raises(CheckpointInvalid, match=says):
        read(tensors)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"peft_type": "LORA"}'])
def test_a_config_that_is_none(text: bytes) -> None:
    with pytest.raises(CheckpointInvalid, match="adapter_config"):
        read_adapter(text, [])


def test_what_fits() -> None:
    fits(base(model__layers__0__q_proj__weight=(6, 4)), read(adapter()))
    fits(base({f"{Q}.weight": "w"}, w=(6, 4)), read(adapter()))
    fits(base(model__layers__0__q_proj__weight=(4, 6)), read(adapter(), fan_in_fan_out=True))
    whole = {**adapter(), f"{PREFIX}score.weight": tensor(2, 4)}
    fits(base(model__layers__0__q_proj__weight=(6, 4)), read(whole, modules_to_save=["score"]))


@pytest.mark.parametrize(
    ("manifest", "found", "says"),
    [
        (base(other=(6, 4)), read(adapter()), f"changes module {Q}, and the weights have no {Q}.weight"),
        (base(model__layers__0__q_proj__weight=(4, 6)), read(adapter()), r"makes \[6, 4\] for module .* is \[4, 6\]"),
        (base(model__layers__0__q_proj__weight=(24,)), read(adapter()), r"is \[24\]"),
        (
            base(model__layers__0__q_proj__weight=(6, 4)),
            read({**adapter(), f"{PREFIX}score.weight": tensor(2, 4)}),
            "replaces score.weight, which the weights do not have",
        ),
        (
            base(model__layers__0__q_proj__weight=(6, 4), score__weight=(3, 4)),
            read({**adapter(), f"{PREFIX}score.weight": tensor(2, 4)}),
            r"replaces score.weight by \[2, 4\]",
        ),
    ],
)
def test_the_first_that_does_not_fit_is_named(manifest: Manifest, found: Adapter, says: str) -> None:
    with pytest.raises(InvalidSpec, match=says):
        fits(manifest, found)


def test_weights_that_are_themselves_an_adapter() -> None:
    manifest = Manifest(total_bytes=0, parts=[], chunks=[], tensors={}, files={"adapter_config.json": FileEntry(0, 0)})
    with pytest.raises(InvalidSpec, match="which is no model"):
        fits(manifest, read(adapter()))


def test_quantised_weights_are_not_changed() -> None:
    manifest = base(model__layers__0__q_proj__weight=(6, 4))
    manifest.tensors[f"{Q}.weight"] = TensorEntry(0, 0, "U8", (6, 4), 0)
    with pytest.raises(InvalidSpec, match="is stored as U8"):
        fits(manifest, read(adapter()))


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
