"""The transformers engine over small random models of many families: tokens of `generate`, and no copy of a tensor."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")

import torch

from fleetstart.runtime.contract.errors import CheckpointInvalid, InvalidSpec
from fleetstart.runtime.contract.function.spec import LLMSettings
from fleetstart.runtime.llm.engine.engine import Engine
from fleetstart.runtime.llm.engine.generation import Request
from fleetstart.runtime.llm.engine.sampler import SamplingParams
from fleetstart.runtime.llm.server.engines import load_engine
from tests.runner.late import late
from tests.runtime.llm.models import Checkpoint, byte_tokenizer, run, tokens_of

transformers = late("transformers")
pytestmark = pytest.mark.slow
"""Whichever test is first pays for the import."""

SIZES: dict[str, Any] = {
    "vocab_size": 258, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "eos_token_id": 1,
    "bos_token_id": 0, "pad_token_id": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_neox": {"intermediate_size": 96, "max_position_embeddings": 256},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 48, "max_position_embeddings": 256},
    "gpt2": {"n_positions": 256},
    "bloom": {},
    "mistral": {"intermediate_size": 96, "num_key_value_heads": 2, "sliding_window": 8},
    "gemma2": {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 12, "sliding_window": 8},
    "gemma3_text": {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 12, "sliding_window": 8},
    "mixtral": {"intermediate_size": 32, "num_key_value_heads": 2, "num_local_experts": 4},
    "falcon": {"multi_query": True},
    "mpt": {"d_model": 48, "n_heads": 4, "n_layers": 2, "max_seq_len": 256},
    "phi3": {"intermediate_size": 96, "num_key_value_heads": 2},
}
"""Absolute, rotary and no positions but ALiBi; windows in all layers and in some; experts; keys shared among heads."""
SETTINGS: dict[str, Any] = {
    "engine": "transformers", "max_batch": 4, "max_context_tokens": 128, "kv_memory_bytes": 4 << 20,
}  # fmt: skip


@lru_cache
def whole(family: str, **changes: Any) -> Any:
    """A model of transformers with random weights, wide enough apart that the best token is never a close call."""
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(family, **(SIZES | FAMILIES[family] | changes))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.3)
    return model


def checkpoint(family: str, **changes: Any) -> Checkpoint:
    """What `save_pretrained` writes: a tied head is not stored twice."""
    model = whole(family, **changes)
    stored: dict[int, str] = {}
    tensors = {}
    for name, tensor in model.state_dict().items():
        if stored.setdefault(tensor.data_ptr(), name) == name:
            tensors[name] = tensor.clone()
    fields = model.config.to_dict() | {"architectures": [type(model).__name__]}
    files = {
        "config.json": msgspec.json.encode(fields),
        "tokenizer.json": byte_tokenizer(),
        "generation_config.json": b'{"eos_token_id": 1, "do_sample": false}',
    }
    return Checkpoint(tensors, files)


def engine_of(weights: Checkpoint, **changes: Any) -> Engine:
    engine = load_engine(weights, LLMSettings(**(SETTINGS | changes)), threads=1).engine
    assert isinstance(engine, Engine)
    return engine


def prompt(length: int) -> list[int]:
    tokens: list[int] = torch.randint(2, 258, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    return tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_gives_the_tokens_of_generate(family: str) -> None:
    """Prompts of different length together, longer than a window and than a step's tokens."""
    prompts = [prompt(length) for length in (1, 7, 20, 33, 33)]
    model = whole(family)
    wanted = []
    for one in prompts:
        said = model.generate(
            torch.tensor([one]), attention_mask=torch.ones(1, len(one), dtype=torch.long),
            max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=1,
        )  # fmt: skip
        wanted.append(said[0, len(one) :].tolist())
    engine = engine_of(checkpoint(family))
    engine.scheduler.token_budget = 16
    requests = [
        Request(tokens=one, max_new_tokens=12, sampling=SamplingParams(temperature=0), ignore_eos=True)
        for one in prompts
    ]
    assert [tokens_of(deltas) for deltas in run(engine, requests)] == wanted
    assert engine.load.free_blocks == engine.load.block_count


@pytest.mark.parametrize("family", ["gpt_neox", "gpt2"])
def test_parameters_are_the_tensors_of_the_checkpoint(family: str) -> None:
    weights = checkpoint(family)
    engine = engine_of(weights, dtype="fp32")
    runner: Any = engine._runner
    bound = {parameter.data_ptr() for parameter in runner._model.parameters()}
    assert bound == {weights[name].data_ptr() for name, _ in whole(family).named_parameters() if name in weights}


def test_embeddings_are_the_last_hidden_states() -> None:
    tokens = prompt(40)
    engine = engine_of(checkpoint("gpt_neox"))
    engine.scheduler.token_budget = 16
    requests = [
        Request(tokens=tokens, max_new_tokens=0, embeds=True),
        Request(tokens=prompt(9), max_new_tokens=5, sampling=SamplingParams(temperature=0), ignore_eos=True),
    ]
    found = run(engine, requests)
    wanted = whole("gpt_neox").base_model(torch.tensor([tokens])).last_hidden_state[0, -1]
    torch.testing.assert_close(torch.tensor(found[0][-1].embedding), wanted, rtol=1e-4, atol=1e-4)
    assert len(tokens_of(found[1])) == 5


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_type": "mamba"}, "'mamba' keeps a recurrent state"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "'t5' has an encoder"),
        ({"model_type": "no_such"}, "has no model_type 'no_such'"),
        ({"model_type": "llama", "num_attention_heads": 5}, "transformers refuses it"),
        ({"model_type": "gpt2", "architectures": ["GPT2ForSequenceClassification"]}, "does not continue text"),
        ({"model_type": "x", "auto_map": {"AutoModelForCausalLM": "x.X"}}, "code of the checkpoint"),
        ({}, "names no model_type"),
    ],
)
def test_what_it_cannot_run_is_refused_by_name(fields: dict[str, Any], reason: str) -> None:
    files = {"config.json": msgspec.json.encode(fields), "tokenizer.json": byte_tokenizer()}
    with pytest.raises(CheckpointInvalid, match=reason):
        load_engine(Checkpoint({}, files), LLMSettings(**SETTINGS), threads=1)


def test_tensors_that_are_missing_are_named() -> None:
    weights = checkpoint("gpt_neox")
    del weights["gpt_neox.layers.1.mlp.dense_h_to_4h.weight"]
    with pytest.raises(CheckpointInvalid, match=r"lacks gpt_neox.layers.1.mlp.dense_h_to_4h.weight"):
        engine_of(weights)


def test_a_tensor_of_another_shape_is_named_with_both_shapes() -> None:
    weights = checkpoint("gpt_neox")
    name = "gpt_neox.layers.1.attention.dense.weight"
    weights[name] = torch.zeros(48, 40)
    with pytest.raises(CheckpointInvalid, match=rf"^tensor {name} has shape \[48, 40\], .* \[48, 48\]$"):
        engine_of(weights)


def test_memory_for_too_few_tokens_is_refused() -> None:
    with pytest.raises(InvalidSpec, match="holds 1 blocks of 1048576 bytes"):
        engine_of(checkpoint("gemma2", head_dim=2048, num_attention_heads=2), kv_memory_bytes=1 << 20)


def test_slots_are_padded_at_the_left() -> None:
    from fleetstart.runtime.llm.transformers_engine.paged_cache import group_slots  # late: it imports transformers

    group = group_slots([[3, 0], [1]], [4, 1], queries=2, block_tokens=4)
    assert group.all.tolist() == [[12, 13, 14, 15, 0, 1], [4, 4, 4, 4, 5, 6]]
    assert group.new.tolist() == [0, 1, 5, 6]
    assert not group.fresh
