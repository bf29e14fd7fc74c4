"""config.json: read as published, refused where the engine would compute something else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from fleetstart.runtime.contract.errors import CheckpointInvalid, InvalidSpec
from fleetstart.runtime.contract.function.spec import LLMSettings
from fleetstart.runtime.contract.sizes import MIB
from fleetstart.runtime.contract.weights.decoder_config import read_config
from fleetstart.runtime.llm.engine.engine import Engine
from fleetstart.runtime.llm.engine.runner import LocalRunner
from fleetstart.runtime.llm.model.layers import gather
from fleetstart.runtime.llm.model.loaded_model import LoadedModel, default_sampling
from fleetstart.runtime.llm.model.loader import load_model
from fleetstart.runtime.llm.model.native_decoder import NativeDecoder
from fleetstart.runtime.llm.model.torch_decoder import TorchDecoder
from tests.runtime.llm.models import TINY, Checkpoint, config_of, tiny


def data(**changes: Any) -> bytes:
    fields = {name: value for name, value in (TINY | changes).items() if value is not None}
    return msgspec.json.encode(fields)


def test_defaults_are_those_of_the_format() -> None:
    config = read_config(data(num_key_value_heads=None, head_dim=None, hidden_size=60, eos_token_id=None))
    assert config.kv_head_count == 6
    assert config.head_dim == 10
    assert config.eos_ids == frozenset()
    assert config.rope.scaling is None


def test_rotary_settings_are_read_in_both_forms() -> None:
    assert read_config(data(rope_theta=5e5)).rope.theta == 5e5
    newer = read_config(data(rope_theta=None, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}))
    assert newer.rope.theta == 5e5
    assert newer.rope.scaling is None


def test_generation_config_tells_where_to_end() -> None:
    assert read_config(data(eos_token_id=3)).eos_ids == {3}
    assert read_config(data(eos_token_id=[3, 4])).eos_ids == {3, 4}
    assert read_config(data(eos_token_id=3), b'{"eos_token_id": [5, 6]}').eos_ids == {5, 6}
    assert read_config(data(eos_token_id=3), b"{}").eos_ids == {3}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mixtral"}, "model_type 'mixtral'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"model_type": "gemma3"}, "model_type 'gemma3'"),
        ({"model_type": 7}, "model_type 7"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias is not supported for Mistral"),
        ({"model_type": "qwen2", "mlp_bias": True}, "mlp_bias is not supported for Qwen2"),
        ({"sliding_window": 4096}, "sliding_window is not supported for Llama"),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window must be a positive"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported for Llama"),
        ({"model_type": "phi3", "partial_rotary_factor": 7}, "makes 112 of 16 numbers rotate"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "gemma3_text", "hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ({"model_type": "gemma3_text", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({"model_type": "gemma3_text", "layer_types": ["full_attention"]}, "layer_types must name 3 layers"),
        ({"model_type": "gemma3_text", "layer_types": ["chunked"] * 3}, "layer_types: 'chunked'"),
        ({"model_type": "granite", "logits_scaling": 0}, "logits_scaling must be a positive number"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping 30.0 is not supported for Llama"),
        ({"quantization_config": {"bits": 4}}, "quantised weights .* here quant_method is None"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "rope scaling 'mrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear': factor must be a positive number, is None"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "short_factor must be a list of 8"),
        ({"rope_scaling": [4.0]}, "rotary settings must be an object"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_attention_heads": "six"}, "num_attention_heads"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 4}, "do not divide"),
        ({"head_dim": 15}, "head_dim"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointInvalid, match=named):
        read_config(data(**changes))


@pytest.mark.parametrize("broken", [b"", b"[]", b"{", b"\xff"])
def test_what_is_no_object_is_refused(broken: bytes) -> None:
    with pytest.raises(CheckpointInvalid, match=r"config\.json"):
        read_config(broken)


def test_a_missing_and_a_misshapen_tensor_are_named(tiny_model: Checkpoint) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    config = config_of(tiny_model)
    lacking = Checkpoint({key: value for key, value in tiny_model.items() if key != name}, {})
    with pytest.raises(CheckpointInvalid, match=name):
        gather(lacking, config, 0, 3)
    for spoilt in (torch.zeros(3, 3), torch.zeros(96, 64, dtype=torch.float64), torch.zeros(96, 64, dtype=torch.int32)):
        with pytest.raises(CheckpointInvalid, match=name):
            gather(Checkpoint({**tiny_model, name: spoilt}, {}), config, 0, 3)


def test_sampling_defaults_are_the_checkpoints() -> None:
    assert default_sampling(None).temperature == 1.0
    assert default_sampling(b'{"do_sample": false, "temperature": 0.7}').greedy
    chosen = default_sampling(b'{"do_sample": true, "temperature": 0.7, "top_p": 0.9, "top_k": 40}')
    assert (chosen.temperature, chosen.top_p, chosen.top_k) == (0.7, 0.9, 40)


def test_shapes_that_no_kernel_takes_run_on_torch(tiny_model: Checkpoint) -> None:
    narrow = tiny(hidden_size=60, intermediate_size=90)
    assert not config_of(tiny_model).not_native
    assert config_of(narrow).not_native == "hidden_size 60 is no multiple of 16"
    model = load_model(narrow, LLMSettings(kv_memory_bytes=MIB), threads=1, device="cpu")
    assert isinstance(_decoder_of(model), TorchDecoder)
    model = load_model(tiny_model, LLMSettings(kv_memory_bytes=MIB), threads=1, device="cpu")
    assert isinstance(_decoder_of(model), NativeDecoder)


def _decoder_of(model: LoadedModel) -> object:
    assert isinstance(model.engine, Engine)
    runner = model.engine._runner
    assert isinstance(runner, LocalRunner)
    return runner._decoder


def test_memory_for_too_few_tokens_is_refused() -> None:
    large = tiny(num_hidden_layers=1, num_key_value_heads=6, head_dim=2048, intermediate_size=16)
    with pytest.raises(InvalidSpec, match="kv_memory of 1048576 bytes"):
        load_model(large, LLMSettings(kv_memory_bytes=MIB), threads=1, device="cpu")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(tiny_model: Checkpoint, name: str) -> None:
    kept = ("config.json", "tokenizer.json", "generation_config.json")
    files = {kept_name: tiny_model.file(kept_name) for kept_name in kept if kept_name != name}
    with pytest.raises(CheckpointInvalid, match=f"no {name}"):
        load_model(Checkpoint(dict(tiny_model), files), LLMSettings(), threads=1, device="cpu")
