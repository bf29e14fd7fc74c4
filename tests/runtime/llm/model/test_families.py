"""Each family gives the tokens that transformers gives, whole and cut into stages, on either decoder."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import msgspec
import pytest
import torch

from fleetstart.runtime.contract.function.spec import LLMSettings
from fleetstart.runtime.contract.sizes import MIB
from fleetstart.runtime.llm.engine.engine import Engine
from fleetstart.runtime.llm.engine.generation import Request
from fleetstart.runtime.llm.engine.runner import LocalRunner
from fleetstart.runtime.llm.engine.sampler import SamplingParams
from fleetstart.runtime.llm.model.loaded_model import LoadedModel
from fleetstart.runtime.llm.model.loader import load_model
from fleetstart.runtime.llm.server.engines import load_engine
from tests.runtime.llm.batches import ISAS, batch_of, some_tokens, steps, table
from tests.runtime.llm.families import CASES, FAMILIES, family_model, greedy, shortfall
from tests.runtime.llm.models import Checkpoint, config_of, engine, native, plain, run, tokens_of
from tests.runtime.llm.stages import DTYPES, Pipeline

NEW_TOKENS = 20
TF32_TIE = 0.05
"""Spreads of the logits that a token may be below the likeliest one, where vLLM's attention computes fp32 in TF32."""
PROMPTS = [some_tokens(3, 1), some_tokens(41, 2), some_tokens(17, 3)]


def requests(prompts: list[list[int]] = PROMPTS, tokens: int = NEW_TOKENS) -> list[Request]:
    return [Request(tokens=prompt, max_new_tokens=tokens, sampling=SamplingParams(temperature=0)) for prompt in prompts]


def answers(weights: Checkpoint, decoder: Any) -> list[list[int]]:
    """Of all prompts at once, in chunks."""
    found = run(engine(weights, decoder, token_budget=24), requests())
    return [tokens_of(deltas) for deltas in found]


def check(theirs: Any, found: list[list[int]]) -> None:
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        assert tokens
        assert greedy(theirs, prompt + tokens, len(tokens)) == tokens


def decoders_of(weights: Checkpoint) -> list[Any]:
    return [plain, native] if not config_of(weights).not_native else [plain]


@pytest.mark.parametrize("case", [case for case in CASES if "longrope" not in case])
def test_tokens_are_those_of_transformers(case: str) -> None:
    model = family_model(case)
    for decoder in decoders_of(model.weights):
        check(model.theirs, answers(model.weights, decoder(model.weights)))


@pytest.mark.parametrize("cut", [1])
@pytest.mark.parametrize("case", FAMILIES)
def test_tokens_through_two_stages_are_those_of_the_whole_model(case: str, cut: int) -> None:
    weights = family_model(case).weights
    for kind in ["torch", "auto"] if not config_of(weights).not_native else ["torch"]:
        halves = [answers(weights, Pipeline(kind, weights, cuts)) for cuts in ({cut}, set())]
        assert halves[0] == halves[1]


@pytest.mark.parametrize(("context", "length"), [(32, 20), (512, 60)], ids=["short", "long"])
def test_a_deployments_context_chooses_the_factors_of_longrope(context: int, length: int) -> None:
    model = family_model("phi3, longrope")
    tokens = some_tokens(length)
    with torch.inference_mode():
        wanted = model.theirs(torch.tensor([tokens])).logits[0]
    for decoder in decoders_of(model.weights):
        subject = decoder(model.weights, context=context)
        got = subject.forward(batch_of([(tokens, 0, table(0, length))], every_row=True))
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_dynamic_scaling_stretches_the_base_for_contexts_beyond_training() -> None:
    model = family_model("llama, dynamic")
    assert config_of(model.weights, 10**6).context_tokens == 1024
    tokens = some_tokens(700)
    with torch.inference_mode():
        wanted = model.theirs(torch.tensor([tokens])).logits[0, -1:]
    for decoder in decoders_of(model.weights):
        subject = decoder(model.weights, context=700)
        torch.testing.assert_close(
            subject.forward(batch_of([(tokens, 0, table(0, 700))])), wanted, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", [case for case in CASES if "softcaps" not in case and "llama" not in case])
def test_native_equals_torch(case: str, dtype: torch.dtype, isa: str) -> None:
    whole = family_model(case).weights
    weights = Checkpoint({name: tensor.to(dtype) for name, tensor in whole.items()}, whole._files)
    for got, wanted in zip(steps(native(weights, isa=isa)), steps(plain(weights)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("case", FAMILIES)
def test_narrow_weights_and_caches_stay_close_to_transformers(case: str, name: str) -> None:
    model = family_model(case)
    rounded = {key: tensor.to(DTYPES[name]) for key, tensor in model.weights.items()}
    tokens = some_tokens(40)
    with torch.inference_mode():
        widened = {key: tensor.float() for key, tensor in rounded.items()}
        wanted = torch.func.functional_call(model.theirs, widened, (torch.tensor([tokens]),)).logits[0]
    decoder = native(Checkpoint(rounded, model.weights._files), kv=name)
    got = decoder.forward(batch_of([(tokens, 0, table(0, 40))], every_row=True))
    assert (got - wanted).abs().mean() < 0.02 * wanted.std()


@pytest.mark.parametrize("case", FAMILIES)
def test_the_transformers_engine_gives_the_same_tokens(case: str) -> None:
    model = family_model(case)
    settings = LLMSettings(engine="transformers", max_batch=4, max_context_tokens=128, kv_memory_bytes=4 * MIB)
    loaded = load_engine(model.weights, settings, threads=1).engine
    assert isinstance(loaded, Engine)
    check(model.theirs, [tokens_of(deltas) for deltas in run(loaded, requests())])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", FAMILIES)
def test_tokens_on_cuda_are_those_of_transformers(case: str) -> None:
    model = family_model(case)
    settings = LLMSettings(max_batch=4, max_context_tokens=128, kv_memory_bytes=4 * MIB)
    engine = load_model(model.weights, settings, threads=1, device="cuda").engine
    check(model.theirs, [tokens_of(deltas) for deltas in run(engine, requests())])


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # its modules warn of one another
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make vllm-test")
@pytest.mark.parametrize("case", FAMILIES)
def test_the_vllm_engine_gives_the_same_tokens(case: str) -> None:
    model = family_model(case, wide=True)
    settings = LLMSettings(engine="vllm", max_batch=4, max_context_tokens=128, kv_memory_bytes=4 * MIB)
    loaded = load_engine(model.weights, settings, threads=1).engine
    found = [tokens_of(deltas) for deltas in run(loaded, requests())]
    loaded.close()
    if not torch.cuda.is_available():
        check(model.theirs, found)
        return
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        assert len(tokens) == NEW_TOKENS or tokens[-1] in config_of(model.weights).eos_ids
        assert shortfall(model.theirs, prompt + tokens, len(tokens)) < TF32_TIE


@pytest.mark.parametrize(
    ("field", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "float16"}, torch.float16),
        ({"dtype": "float32"}, torch.float32),
        ({"torch_dtype": None, "dtype": None}, torch.float32),
    ],
)
def test_dtype_auto_is_the_stored_one(field: dict[str, Any], dtype: torch.dtype) -> None:
    weights = family_model("qwen3").weights
    fields = msgspec.json.decode(weights.file("config.json")) | field
    stored = Checkpoint(dict(weights), {**weights._files, "config.json": msgspec.json.encode(fields)})
    settings = LLMSettings(dtype="auto", kv_memory_bytes=MIB, max_context_tokens=64)
    config = config_of(stored)
    kept = decoder_of(load_model(stored, settings, threads=1, device="cpu")).read_kv([0], 0, 1)
    assert len(kept) == 2 * config.layer_count * config.kv_width * dtype.itemsize


def decoder_of(model: LoadedModel) -> Any:
    assert isinstance(model.engine, Engine)
    runner = model.engine._runner
    assert isinstance(runner, LocalRunner)
    return runner._decoder
