"""Quantised weights that the native engine takes or refuses, by their config.json."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from fleetstart.runtime.contract.errors import CheckpointInvalid
from fleetstart.runtime.contract.weights.quantization import INT8_CONFIG, has_int8_matrices


def group(settings: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = settings["config_groups"]["group_0"]
    return found


def test_what_is_not_quantised_has_none() -> None:
    assert not has_int8_matrices({})
    assert not has_int8_matrices({"quantization_config": None})


@pytest.mark.parametrize(
    "change",
    [
        lambda settings: None,
        lambda settings: settings.update(
            ignore=["lm_head", "model.layers.0.mlp.up_proj"], global_compression_ratio=1.3
        ),
        lambda settings: group(settings).update(input_activations=None),
        lambda settings: group(settings)["weights"].update(observer="mse", group_size=None, actorder=None),
    ],
    ids=["our own", "more to ignore", "no activations", "as llm-compressor writes it"],
)
@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
def test_int8_by_channel_is_taken(change: Callable[[dict[str, Any]], None], field: str) -> None:
    settings = copy.deepcopy(INT8_CONFIG)
    change(settings)
    assert has_int8_matrices({field: settings})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda settings: settings.update(quant_method="gptq"), "quant_method is 'gptq'"),
        (lambda settings: settings.update(format="pack-quantized"), "format is 'pack-quantized'"),
        (lambda settings: settings.update(config_groups={}), "format is 'int-quantized'"),
        (lambda settings: settings.update(kv_cache_scheme={"num_bits": 8}), "keys and values are quantised, too"),
        (lambda settings: settings["config_groups"].update(group_1=None), "group_1 has no weights"),
        (lambda settings: group(settings).update(weights=None), "group_0 has no weights"),
        (lambda settings: group(settings)["weights"].update(num_bits=4), "num_bits of group_0 is 4"),
        (lambda settings: group(settings)["weights"].update(type="float"), "type of group_0 is 'float'"),
        (lambda settings: group(settings)["weights"].update(symmetric=False), "symmetric of group_0 is False"),
        (lambda settings: group(settings)["weights"].update(strategy="group"), "strategy of group_0 is 'group'"),
    ],
)
def test_all_else_is_refused_with_what_differs(change: Callable[[dict[str, Any]], None], said: str) -> None:
    settings = copy.deepcopy(INT8_CONFIG)
    change(settings)
    with pytest.raises(CheckpointInvalid, match=said):
        has_int8_matrices({"quantization_config": settings})


def test_settings_that_are_no_object_are_refused() -> None:
    with pytest.raises(CheckpointInvalid, match="must be an object, is 'int8'"):
        has_int8_matrices({"quantization_config": "int8"})
