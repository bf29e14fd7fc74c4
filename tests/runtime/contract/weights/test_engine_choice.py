"""The engine of a model by its config.json: chosen, named or refused, with the reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fleetstart.runtime.contract.errors import CheckpointInvalid, InvalidSpec
from fleetstart.runtime.contract.weights.causal_config import read_causal_config
from fleetstart.runtime.contract.weights.engine_choice import SETTINGS, EngineSetting, choose_engine, engine_setting
from fleetstart.runtime.contract.weights.quantization import INT8_CONFIG

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64,
}  # fmt: skip
NEOX: dict[str, Any] = {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]}
MAMBA: dict[str, Any] = {"model_type": "mamba"}
BERT: dict[str, Any] = {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}
INT8: dict[str, Any] = {"quantization_config": INT8_CONFIG}
AWQ: dict[str, Any] = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
BITSANDBYTES: dict[str, Any] = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}


@pytest.mark.parametrize(
    ("setting", "fields", "engine"),
    [
        ("auto", LLAMA, "native"),
        ("auto", NEOX, "transformers"),
        ("native", LLAMA, "native"),
        ("transformers", LLAMA, "transformers"),
        ("transformers", NEOX, "transformers"),
        ("vllm", NEOX, "vllm"),
        ("vllm", MAMBA, "vllm"),
        ("auto", LLAMA | INT8, "native"),
        ("native", LLAMA | INT8, "native"),
        ("vllm", LLAMA | INT8, "vllm"),
        ("vllm", NEOX | AWQ, "vllm"),
    ],
)
def test_the_engine_that_is_named_or_fits(setting: EngineSetting, fields: dict[str, Any], engine: str) -> None:
    choice = choose_engine(setting, json.dumps(fields).encode())
    assert choice.engine == engine
    assert choice.reason


@pytest.mark.parametrize(
    ("setting", "fields", "reason", "hint"),
    [
        ("native", NEOX, "model_type 'gpt_neox' is not supported", 'leave out engine="native"'),
        ("native", MAMBA, "model_type 'mamba' is not supported", "handler of your own"),
        ("transformers", MAMBA, "'mamba' keeps a recurrent state", 'engine="vllm"'),
        ("auto", MAMBA, "recurrent state.*and for the native engine: .*model_type 'mamba'", "handler of your own"),
        ("auto", BERT, "BertForSequenceClassification does not continue text", "task="),
        ("vllm", BERT, "BertForSequenceClassification does not continue text", "task="),
        (
            "auto",
            LLAMA | AWQ,
            "transformers runs no quantised weights.*native engine.*method is 'awq'",
            'engine="vllm"',
        ),
        ("auto", LLAMA | BITSANDBYTES, "method is 'bitsandbytes'", "store fp16"),
        ("native", LLAMA | AWQ, "int8 and by channel; here quant_method is 'awq'", 'engine="vllm"'),
        ("transformers", LLAMA | INT8, "transformers runs no quantised weights", 'engine="vllm"'),
        ("vllm", LLAMA | BITSANDBYTES, "vLLM gets no weights of quant_method 'bitsandbytes'", "awq"),
        ("auto", {"is_encoder_decoder": True, "model_type": "t5"}, "'t5' has an encoder", ""),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(
    setting: EngineSetting, fields: dict[str, Any], reason: str, hint: str
) -> None:
    with pytest.raises(CheckpointInvalid, match=reason) as refused:
        choose_engine(setting, json.dumps(fields).encode())
    assert hint in refused.value.hint


@pytest.mark.parametrize(
    ("setting", "first", "fields", "reason", "hint"),
    [
        (
            "vllm",
            "native",
            NEOX,
            "the native engine cannot answer first: .*'gpt_neox' is not supported",
            "vllm runs it",
        ),
        ("transformers", "native", MAMBA, "'mamba' keeps a recurrent state", 'engine="vllm"'),
        ("auto", "native", LLAMA, "engine='auto' names none", 'engine="vllm", first="native"'),
        ("native", "native", LLAMA, "engine='native' names none", "leave out first"),
        ("vllm", "transformers", LLAMA, "first='transformers' is not an engine that answers first", "native"),
        ("vllm", 1, LLAMA, "first=1 is not an engine", "native"),
    ],
)
def test_two_engines_that_do_not_go_together_are_refused(
    setting: EngineSetting, first: object, fields: dict[str, Any], reason: str, hint: str
) -> None:
    with pytest.raises((CheckpointInvalid, InvalidSpec), match=reason) as refused:
        choose_engine(setting, json.dumps(fields).encode(), first)
    assert hint in refused.value.hint


def test_an_engine_behind_the_native_one_is_told() -> None:
    choice = choose_engine("vllm", json.dumps(LLAMA).encode(), "native")
    assert (choice.engine, choice.reason) == ("vllm", "as declared; the native engine answers until it is up")


@pytest.mark.parametrize("setting", ["auto", "native"])
def test_a_model_that_divides_is_split_by_the_native_engine(setting: EngineSetting) -> None:
    choice = choose_engine(setting, json.dumps(LLAMA).encode(), tensor_parallel_size=2)
    assert (choice.engine, choice.reason) == ("native", "it splits the model over 2 devices")


@pytest.mark.parametrize(
    ("setting", "first", "fields", "ranks", "reason"),
    [
        ("auto", "", LLAMA, 3, "over 3 devices: num_attention_heads 4 is no multiple of 3"),
        ("auto", "", LLAMA | {"num_key_value_heads": 2}, 4, "num_key_value_heads 2 is no multiple of 4"),
        ("native", "", LLAMA | {"intermediate_size": 65}, 2, "intermediate_size 65 is no multiple of 2"),
        ("auto", "", NEOX, 2, "model_type 'gpt_neox' is not supported"),
        ("vllm", "", LLAMA, 2, "engine='vllm' names another"),
        ("auto", "native", LLAMA, 2, "first='native' names another"),
    ],
)
def test_what_cannot_be_split_is_refused(
    setting: EngineSetting, first: str, fields: dict[str, Any], ranks: int, reason: str
) -> None:
    with pytest.raises((CheckpointInvalid, InvalidSpec), match=reason):
        choose_engine(setting, json.dumps(fields).encode(), first, ranks)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_file_that_is_no_json_is_refused(setting: EngineSetting) -> None:
    with pytest.raises(CheckpointInvalid, match="not a JSON object"):
        choose_engine(setting, b"[")


def test_an_unknown_engine_is_named_with_those_that_there_are() -> None:
    assert engine_setting("vllm") == "vllm"
    with pytest.raises(InvalidSpec, match="engine='tgi' is none of 'auto', 'native', 'transformers', 'vllm'"):
        engine_setting("tgi")


def test_positions_and_end_tokens_are_read_by_the_names_that_families_use() -> None:
    def read(fields: dict[str, Any], generation: bytes | None = None) -> tuple[int, set[int]]:
        config = read_causal_config(json.dumps({"model_type": "x"} | fields).encode(), generation)
        return config.max_positions, set(config.eos_ids)

    assert read({}) == (0, set())
    assert read({"n_positions": 256, "eos_token_id": 3}) == (256, {3})
    assert read({"max_position_embeddings": 64, "eos_token_id": 3}, b'{"eos_token_id": [4, 5]}') == (64, {4, 5})
    assert read({"text_config": {"max_position_embeddings": 32, "eos_token_id": 6}}) == (32, {6})
    with pytest.raises(CheckpointInvalid, match="eos_token_id must be a number"):
        read({"eos_token_id": "</s>"})
