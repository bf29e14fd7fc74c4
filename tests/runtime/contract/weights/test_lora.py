"""Which LoRA adapters can be applied, to which tensors, and by how much."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fleetstart.runtime.contract.errors import CheckpointInvalid
from fleetstart.runtime.contract.weights.lora import (
    CONFIG_MAX_BYTES,
    MUST_BE_OFF,
    Adapter,
    Tensor,
    check_fits,
    read_adapter,
    read_config,
)
from tests.controller.cli.adapters import PREFIX, adapter, config
from tests.controller.cli.checkpoints import Tensor as Stored
from tests.controller.cli.checkpoints import tensor

Q = "model.layers.0.q_proj"


def read(tensors: dict[str, Stored], *, patterns: bool = True, **changes: Any) -> Adapter:
    rows = ((name, Tensor(dtype, shape)) for name, (dtype, shape, _) in tensors.items())
    return read_adapter(json.dumps(config(**changes)).encode(), rows, patterns=patterns)


def base(**tensors: tuple[int, ...]) -> dict[str, Tensor]:
    return {name.replace("__", "."): Tensor("F32", shape) for name, shape in tensors.items()}


def test_an_adapter_as_peft_writes_it() -> None:
    found = read(adapter())
    assert found.pairs.keys() == {Q}
    assert not found.whole
    assert read(adapter(), use_rslora=True).config.use_rslora
    assert read(adapter(rank=5), rank_pattern={"q_proj": 5}).pairs.keys() == {Q}
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
        ({"r": 3, "rank_pattern": {"k_proj": 2}}, "has rank 2, adapter_config.json says 3"),
        ({"rank_pattern": {"q_proj": 3}}, "has rank 2, adapter_config.json says 3"),
        ({"rank_pattern": {"q": 0}}, "at least 1, q is 0"),
        ({"rank_pattern": {"(": 2}}, "'\\(' is no regular expression"),
        ({"alpha_pattern": {"*": 2}}, "is no regular expression"),
        ({"target_modules": r".*\.k_proj"}, f"do not name {Q}"),
        ({"target_modules": "q_proj"}, f"do not name {Q}"),
        ({"target_modules": "["}, "is no regular expression"),
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
        ({**adapter(), f"{PREFIX}a.b": tensor(4), f"{PREFIX}a.base_layer.b": tensor(4)}, "are both for 'a.b'"),
        ({name.replace(".weight", ".default.weight"): one for name, one in adapter().items()}, "not applied"),
    ],
)
def test_tensors_that_cannot_be_applied_are_named(tensors: dict[str, Stored], says: str) -> None:
    with pytest.raises(CheckpointInvalid, match=says):
        read(tensors)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"peft_type": "LORA"}'])
def test_a_config_that_is_none(text: bytes) -> None:
    with pytest.raises(CheckpointInvalid, match="adapter_config"):
        read_adapter(text, [], patterns=True)


def test_a_config_past_its_size() -> None:
    with pytest.raises(CheckpointInvalid, match="1048577 bytes, 1048576 at most"):
        read_config(bytes(CONFIG_MAX_BYTES + 1))


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({}, 8 / 4),
        ({"use_rslora": True}, 8 / 2),
        ({"use_rslora": None}, 8 / 4),
        ({"alpha_pattern": {"k_proj": 100, "q_proj": 3}}, 3 / 4),
        ({"alpha_pattern": {"q_proj": 3, ".*": 100}}, 3 / 4),
        ({"r": 64, "rank_pattern": {"layers.0.q_proj": 4}}, 8 / 4),
        ({"alpha_pattern": {r"layers\.\d+\.q_proj": 6}, "use_rslora": True}, 6 / 2),
        ({"alpha_pattern": {"j": 100, "ayers.0.q_proj": 100}}, 8 / 4),
    ],
)
def test_a_pattern_is_of_the_end_of_a_modules_name(changes: dict[str, Any], scale: float) -> None:
    found = read(adapter(rank=4), **{"r": 4, "lora_alpha": 8, **changes})
    assert found.config.scale(Q) == scale


@pytest.mark.parametrize("targets", [["q_proj"], [Q], r".*\.q_proj", "(?i).*Q_PROJ", "all-linear"])
def test_targets_are_ends_of_names_or_an_expression_of_whole_ones(targets: list[str] | str) -> None:
    assert read(adapter(), target_modules=targets).pairs.keys() == {Q}


@pytest.mark.parametrize(
    "changes", [{"target_modules": "(.*.*)*x"}, {"rank_pattern": {"(.*.*)*x": 3}}, {"alpha_pattern": {"(.*.*)*x": 3}}]
)
def test_expressions_that_take_for_ever_can_be_left_alone(changes: dict[str, Any]) -> None:
    module = "model." + "a" * 100
    assert read(adapter(module=f"{module}.q"), patterns=False, **changes).pairs.keys() == {f"{module}.q"}


def test_what_fits() -> None:
    check_fits(read(adapter()), base(model__layers__0__q_proj__weight=(6, 4)))
    check_fits(read(adapter(), fan_in_fan_out=True), base(model__layers__0__q_proj__weight=(4, 6)))
    whole = {**adapter(), f"{PREFIX}score.weight": tensor(2, 4)}
    check_fits(read(whole, modules_to_save=["score"]), base(model__layers__0__q_proj__weight=(6, 4)))


@pytest.mark.parametrize(
    ("weights", "found", "says"),
    [
        (base(other=(6, 4)), read(adapter()), f"changes module {Q}, and the base has no {Q}.weight; .* 1: none"),
        (base(model__layers__0__q_proj__weight=(4, 6)), read(adapter()), r"makes \[6, 4\] for module .* is \[4, 6\]"),
        (base(model__layers__0__q_proj__weight=(24,)), read(adapter()), r"is \[24\]"),
        (
            base(model__layers__0__q_proj__weight=(6, 4)),
            read({**adapter(), f"{PREFIX}score.weight": tensor(2, 4)}),
            "replaces score.weight, and the base has no score.weight",
        ),
        (
            base(model__layers__0__q_proj__weight=(6, 4), score__weight=(3, 4)),
            read({**adapter(), f"{PREFIX}score.weight": tensor(2, 4)}),
            r"replaces score.weight by \[2, 4\]",
        ),
    ],
)
def test_the_first_that_does_not_fit_is_named(weights: dict[str, Tensor], found: Adapter, says: str) -> None:
    with pytest.raises(CheckpointInvalid, match=says):
        check_fits(found, weights)


def test_quantised_weights_are_not_changed() -> None:
    with pytest.raises(CheckpointInvalid, match="is stored as U8"):
        check_fits(read(adapter()), {f"{Q}.weight": Tensor("U8", (6, 4))})
