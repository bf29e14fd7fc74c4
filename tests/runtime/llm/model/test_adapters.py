"""A language model with a LoRA adapter over shared weights says what the merged model says, on either decoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fleetstart.runtime.contract.function.spec import LLMSettings
from fleetstart.runtime.llm.engine.generation import Request
from fleetstart.runtime.llm.engine.sampler import SamplingParams
from fleetstart.runtime.llm.model.layers import EMBEDDING, HEAD
from fleetstart.runtime.llm.model.loader import load_model
from fleetstart.runtime.weights.lora import AdaptedWeights
from tests.runtime.llm.batches import batch_of, some_tokens
from tests.runtime.llm.models import Checkpoint, native, plain, run, stage_of, tiny, tokens_of
from tests.runtime.weights.test_lora import P, config, filled, noise, pair, segment_of

TARGETS = ("model.layers.0.self_attn.q_proj", "model.layers.2.mlp.down_proj")


def adapted(base: Checkpoint, adapter: dict[str, Tensor], **changes: Any) -> AdaptedWeights:
    files = {name: base.file(name) for name in ("config.json", "tokenizer.json", "generation_config.json")}
    return AdaptedWeights(
        filled(segment_of(dict(base), files)).attach(), filled(segment_of(adapter, config(**changes))).attach()
    )


def adapter_of(base: Checkpoint) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for module in TARGETS:
        outputs, inputs = base[f"{module}.weight"].shape
        tensors |= pair(module, inputs, outputs)
    return tensors


def merged(base: Checkpoint, adapter: dict[str, Tensor]) -> Checkpoint:
    names = ("config.json", "tokenizer.json", "generation_config.json")
    result = Checkpoint(dict(base), {name: base.file(name) for name in names})
    for module in TARGETS:
        a, b = adapter[f"{P}{module}.lora_A.weight"], adapter[f"{P}{module}.lora_B.weight"]
        weight = base[f"{module}.weight"]
        result[f"{module}.weight"] = (weight.float() + 2.0 * (b @ a)).to(weight.dtype)
    return result


@pytest.mark.parametrize("decoder", [native, plain])
def test_logits_are_those_of_the_merged_model(decoder: Any) -> None:
    base = tiny()
    adapter = adapter_of(base)
    batch = batch_of([(some_tokens(20), 0, [4, 2])])
    got = decoder(adapted(base, adapter)).forward(batch).clone()
    torch.testing.assert_close(got, decoder(merged(base, adapter)).forward(batch), rtol=1e-3, atol=2e-2)
    assert (got - decoder(base).forward(batch)).abs().max() > 0.5


def test_a_loaded_model_says_what_the_merged_one_says() -> None:
    base = tiny(dtype=torch.float32)
    adapter = adapter_of(base)
    request = Request(tokens=some_tokens(12), max_new_tokens=16, sampling=SamplingParams(temperature=0))
    settings = LLMSettings(max_batch=1, max_context_tokens=64, kv_memory_bytes=1 << 20)
    answers = [
        tokens_of(run(load_model(weights, settings, threads=1, device="cpu").engine, [request])[0])
        for weights in (adapted(base, adapter), merged(base, adapter), base)
    ]
    assert answers[0] == answers[1] != answers[2]


def test_a_tied_head_and_the_embedding_are_one_tensor() -> None:
    stage = stage_of(adapted(tiny(), adapter_of(tiny())))
    assert stage.head is stage.embedding


@pytest.mark.parametrize("name", [HEAD, EMBEDDING])
def test_an_adapter_of_one_end_of_a_tied_model_leaves_the_other_as_it_was(name: str) -> None:
    base = tiny()
    whole = noise(*base[EMBEDDING].shape, seed=8)
    adapter = {**adapter_of(base), P + name: whole}
    stage = stage_of(adapted(base, adapter, modules_to_save=[name.removesuffix(".weight")]))
    ends = {EMBEDDING: stage.embedding, HEAD: stage.head}
    other = ({HEAD, EMBEDDING} - {name}).pop()
    assert torch.equal(ends[name], whole)  # type: ignore[arg-type]
    assert torch.equal(ends[other], base[EMBEDDING])  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_a_model_that_streamed_in_says_what_the_cpu_says() -> None:
    base = tiny(dtype=torch.float32)
    request = Request(tokens=some_tokens(12), max_new_tokens=16, sampling=SamplingParams(temperature=0))
    settings = LLMSettings(max_batch=1, max_context_tokens=64, kv_memory_bytes=1 << 20)
    weights = adapted(base, adapter_of(base))
    answers = [
        tokens_of(run(load_model(weights, settings, threads=1, device=device).engine, [request])[0])
        for device in ("cuda", "cpu")
    ]
    assert answers[0] == answers[1]
