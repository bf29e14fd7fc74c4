"""The decoder on torch gives on each device what it gives on the CPU: whole, in stages, over moved caches, twice."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fleetstart.runtime.contract.function.spec import LLMSettings
from fleetstart.runtime.contract.sizes import MIB
from fleetstart.runtime.llm.engine.generation import Request
from fleetstart.runtime.llm.engine.sampler import SamplingParams
from fleetstart.runtime.llm.model.loader import load_model
from fleetstart.runtime.llm.model.torch_decoder import TorchDecoder
from tests.runtime.llm.batches import batch_of, some_tokens, steps, table
from tests.runtime.llm.models import BLOCK_TOKENS, config_of, plain, run, stage_of, tiny, tokens_of

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])]
CLOSE = {torch.bfloat16: 0.08, torch.float16: 0.02}
"""Average difference of logits, in parts of their spread: twice what weights and arithmetic in bf16 make of it here."""


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close_to_whole(device: str, dtype: torch.dtype) -> None:
    weights = tiny(dtype=torch.float32)
    for got, wanted in zip(steps(plain(weights, device=device, dtype=dtype)), steps(plain(weights)), strict=True):
        assert (got.float().cpu() - wanted).abs().mean() < CLOSE[dtype] * wanted.std()


def test_two_stages_give_what_the_whole_model_gives(device: str) -> None:
    weights = tiny(dtype=torch.float32)
    batch = batch_of([(some_tokens(40), 0, table(0, 40))])
    first, last = (_stage(device, begin, end) for begin, end in ((0, 2), (2, 3)))
    hidden = first.forward(batch)
    got = first.logits(last.forward(batch, hidden)[batch.logits_rows])
    torch.testing.assert_close(got.cpu(), plain(weights).forward(batch), rtol=1e-3, atol=1e-3)


def _stage(device: str, first: int, end: int) -> TorchDecoder:
    weights = tiny(dtype=torch.float32)
    return TorchDecoder(
        config_of(weights), stage_of(weights, first, end),
        device=torch.device(device), dtype=torch.float32, block_count=8, block_tokens=BLOCK_TOKENS,
    )  # fmt: skip


def test_a_sequence_goes_on_over_keys_and_values_of_another_decoder(device: str) -> None:
    """As consolidation and a move between devices have it: from the CPU's blocks into others of the device."""
    weights, tokens = tiny(dtype=torch.float32), some_tokens(38)
    whole, there = plain(weights), plain(weights, device=device)
    blocks, others = table(0, 38), [9, 4, 30]
    whole.forward(batch_of([(tokens[:37], 0, blocks)]))
    there.write_kv(others, 0, 37, 0, whole.read_kv(blocks, 0, 37))
    got = there.forward(batch_of([(tokens[37:], 37, others)]))
    wanted = whole.forward(batch_of([(tokens[37:], 37, blocks)]))
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-3, atol=1e-3)
    assert there.read_kv(others, 0, 37) == whole.read_kv(blocks, 0, 37)


@pytest.mark.gpu
@NO_CUDA
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_host_waits_for_no_step_with_prompts(dtype: torch.dtype) -> None:
    decoder = plain(tiny(dtype=dtype, head_dim=64), device="cuda", dtype=dtype)
    unknown = torch.tensor([77], device="cuda")
    second = batch_of([([0], 5, [1]), (some_tokens(300), 0, list(range(2, 21))), (some_tokens(9), 0, [40])])
    first = batch_of([(some_tokens(5), 0, [1])])
    second = replace(second, device_tokens=unknown)
    for _ in range(2):  # libraries choose kernels on first use
        decoder.forward(first)
        wanted = decoder.forward(replace(second, device_tokens=None, tokens=[77, *second.tokens[1:]])).clone()
    decoder.forward(first)
    try:
        with warnings.catch_warnings(action="ignore"):  # it is a prototype, as torch says
            torch.cuda.set_sync_debug_mode("error")
        got = decoder.forward(second)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert decoder.asynchronous
    torch.testing.assert_close(got, wanted)


def test_two_models_on_one_device_do_not_touch_each_other(device: str) -> None:
    models = [tiny(dtype=torch.float32, seed=seed) for seed in (1, 2)]
    both = [plain(weights, device=device) for weights in models]
    batches = [batch_of([(some_tokens(30, seed), 0, table(0, 30))]) for seed in (1, 2, 3)]
    for batch in batches:
        found: list[Tensor] = [decoder.forward(batch).clone() for decoder in both]
        for got, weights in zip(found, models, strict=True):
            torch.testing.assert_close(got.cpu(), plain(weights).forward(batch), rtol=1e-3, atol=1e-3)


def test_a_release_gives_the_memory_back_and_a_regain_the_tokens(device: str) -> None:
    settings = LLMSettings(max_batch=1, max_context_tokens=64, kv_memory_bytes=4 * MIB)
    request = Request(tokens=some_tokens(12), max_new_tokens=16, sampling=SamplingParams(temperature=0))
    engine = load_model(tiny(dtype=torch.float32), settings, threads=1, device=device).engine
    wanted = tokens_of(run(engine, [request])[0])
    engine.release()
    before = _allocated(device)  # what libraries took on first use
    for _ in range(2):
        engine.regain()
        assert tokens_of(run(engine, [request])[0]) == wanted
        assert device == "cpu" or _allocated(device) > before
        engine.release()
        assert _allocated(device) == before


def _allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0
