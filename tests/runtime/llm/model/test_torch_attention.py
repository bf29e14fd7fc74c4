"""Attention of the decoder in torch: every row of a step sees its own sequence, whatever is computed beside it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fleetstart.runtime.llm.model import torch_steps
from fleetstart.runtime.llm.model.cuda.decode_kernels import DecodeKernels, kernels_for, shape_for
from fleetstart.runtime.llm.model.torch_attention import TorchAttention, flash_takes
from fleetstart.runtime.llm.model.torch_decoder import TorchDecoder
from fleetstart.runtime.llm.model.torch_steps import GATHERED_KEYS, KernelDecodes, StepInputs, leading_decodes
from tests.runtime.llm.batches import batch_of, steps
from tests.runtime.llm.model.cuda.emulated_kernels import emulated_kernels
from tests.runtime.llm.models import config_of, plain, tiny

BLOCK_TOKENS, BLOCKS, KV_HEADS, REPEATS = 16, 64, 2, 3
NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CLOSE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
Chunk = tuple[int, int]
"""Rows of a sequence, and its tokens before them."""
CHUNKS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 50)), min_size=1, max_size=6)


def _wanted(query: Tensor, cache: Tensor, slots: list[int], scale: float, softcap: float | None) -> Tensor:
    """Attention of one row [heads, head_dim] over slots, in double precision."""
    keys, values = cache[:, slots].double().view(2, KV_HEADS, len(slots), -1).repeat_interleave(REPEATS, 1)
    scores = (keys @ query.double()[:, :, None])[..., 0] * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    mixed: Tensor = (scores.softmax(-1)[:, None] @ values)[:, 0]
    return mixed


def _check(
    chunks: list[Chunk],
    options: dict[str, Any],
    kernels: DecodeKernels | None,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    head_dim: int = 16,
) -> None:
    """Compares all rows of a step with each one's attention alone. Slots of no sequence are NaN."""
    window, softcap = options.get("window"), options.get("softcap")
    noise = torch.Generator().manual_seed(len(chunks))
    order = torch.randperm(BLOCKS, generator=noise).tolist()
    tables = [[order.pop() for _ in range(-(-(before + rows) // BLOCK_TOKENS))] for rows, before in chunks]
    batch = batch_of([([5] * rows, before, table) for (rows, before), table in zip(chunks, tables, strict=True)])
    inputs = StepInputs(
        device=torch.device(device), dtype=dtype, block_tokens=BLOCK_TOKENS, windows={window, None}, frequencies={}
    )
    cache = torch.full((2 * KV_HEADS, BLOCKS * BLOCK_TOKENS, head_dim), math.nan, dtype=dtype)
    slots = [
        [table[place // BLOCK_TOKENS] * BLOCK_TOKENS + place % BLOCK_TOKENS for place in range(before + rows)]
        for (rows, before), table in zip(chunks, tables, strict=True)
    ]
    for one in slots:
        cache[:, one] = torch.randn((2 * KV_HEADS, len(one), head_dim), generator=noise).to(dtype)
    query = torch.randn((len(batch.tokens), KV_HEADS * REPEATS, head_dim), generator=noise).to(dtype)
    attention = TorchAttention(repeats=REPEATS, scale=head_dim**-0.5, softcap=softcap)
    step = inputs.of_batch(batch, kernels)
    got = attention.over(query.to(device), cache.to(device), step, window).cpu()
    ends = [s for s, (begin, end) in enumerate(itertools.pairwise(batch.starts)) for _ in range(end - begin)]
    written = [slots[s][position] for s, position in zip(ends, batch.positions, strict=True)]
    assert step.written.tolist() == written
    for row, (s, position) in enumerate(zip(ends, batch.positions, strict=True)):
        seen = slots[s][: position + 1]
        wanted = _wanted(query[row], cache, seen if window is None else seen[-window:], attention.scale, softcap)
        torch.testing.assert_close(got[row].double(), wanted, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    decodes=st.lists(st.integers(0, 60), max_size=4),
    chunks=CHUNKS,
    options=st.sampled_from([{}, {"window": 7}, {"window": 64}, {"softcap": 3.0}]),
    by_kernels=st.booleans(),
    gathered=st.sampled_from([1, 60, GATHERED_KEYS]),
)
def test_rows_of_a_step_are_those_of_each_sequence_alone(
    decodes: list[int], chunks: list[Chunk], options: dict[str, Any], by_kernels: bool, gathered: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_steps, "GATHERED_KEYS", gathered)
        _check(
            [(1, before) for before in decodes] + chunks,
            options,
            _kernels(torch.device("cpu"), torch.float32, 16) if by_kernels else None,
        )


@pytest.mark.slow
def test_sequences_of_one_row_at_the_beginning_decode_and_all_others_are_chunks() -> None:
    tables = [[number] for number in range(4)]
    several = batch_of([([5], 3, tables[0]), ([5], 0, tables[1]), ([5, 6], 0, tables[2]), ([5], 9, tables[3])])
    assert leading_decodes(several) == 2
    step = _inputs().of_batch(several, _kernels(torch.device("cpu"), torch.float32, 16))
    assert isinstance(step.decodes, KernelDecodes)
    assert step.decodes.positions.tolist() == [3, 0]
    [chunks] = step.chunks
    assert (chunks.row_ends.tolist(), chunks.key_ends.tolist()) == ([0, 2, 3], [0, 2, 12])
    assert (chunks.row_counts, chunks.key_counts) == ([2, 1], [2, 10])
    assert chunks.slots.tolist() == [32, 33, *range(48, 58)]


def test_prompts_that_share_a_long_prefix_are_not_all_gathered_at_once() -> None:
    """They have it once in the cache, which may be most of a device's memory."""
    table = list(range(GATHERED_KEYS // BLOCK_TOKENS))
    last = GATHERED_KEYS // 3 - 2
    batch = batch_of([([5, 6], last, table)] * 8 + [([5] * 3, GATHERED_KEYS, [*table, len(table)])])
    chunks = _inputs().of_batch(batch, None).chunks
    assert [len(one.key_counts) for one in chunks] == [3, 3, 2, 1]
    assert [len(one.slots) for one in chunks] == [3 * (last + 2), 3 * (last + 2), 2 * (last + 2), GATHERED_KEYS + 3]
    assert [one.row_ends.tolist() for one in chunks] == [[0, 2, 4, 6], [0, 2, 4, 6], [0, 2, 4], [0, 3]]


def _inputs() -> StepInputs:
    return StepInputs(
        device=torch.device("cpu"), dtype=torch.float32, block_tokens=BLOCK_TOKENS, windows={None}, frequencies={}
    )


def test_flash_attention_is_not_asked_on_a_cpu() -> None:
    assert not flash_takes(torch.zeros(1, 2, 64, dtype=torch.float16))


def _kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> DecodeKernels:
    config = config_of(tiny(head_dim=head_dim, num_attention_heads=KV_HEADS * REPEATS, num_key_value_heads=KV_HEADS))
    shape = shape_for(config, dtype, BLOCK_TOKENS)
    assert shape is not None
    if device.type == "cpu":
        return emulated_kernels(shape)
    kernels = kernels_for(device, shape).result()
    assert kernels is not None, "see the log"
    return kernels


@pytest.mark.slow
def test_a_decoder_with_kernels_gives_what_one_without_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tiny(dtype=torch.float32)
    shape = shape_for(config_of(weights), torch.float32, BLOCK_TOKENS)
    assert shape is not None
    monkeypatch.setattr(TorchDecoder, "_kernels", emulated_kernels(shape))
    by_kernels = steps(plain(weights))
    monkeypatch.undo()
    for got, wanted in zip(by_kernels, steps(plain(weights)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@NO_CUDA
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", [{}, {"window": 7}, {"softcap": 3.0}], ids=["plain", "window", "cap"])
def test_rows_of_a_step_on_cuda_are_those_of_each_sequence_alone(
    head_dim: int, dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = None if (dtype, head_dim) == (torch.float32, 256) else _kernels(torch.device("cuda", 0), dtype, head_dim)
    query = torch.zeros(1, 1, head_dim, dtype=dtype, device="cuda")
    assert flash_takes(query) is (dtype != torch.float32)
    for decodes, chunks in (
        ([], [(40, 0)]),
        ([60, 0, 17], [(33, 12), (1, 5), (16, 0)]),
        ([3], [(5, 50), (40, 7)]),
        ([], [(2, 0), (7, 33), (1, 0), (29, 31)]),
    ):
        step = [(1, before) for before in decodes] + chunks
        for own, gathered in ((kernels, GATHERED_KEYS), (None, GATHERED_KEYS), (kernels, 60), (None, 1)):
            monkeypatch.setattr(torch_steps, "GATHERED_KEYS", gathered)
            _check(step, options, own, device="cuda", dtype=dtype, head_dim=head_dim)
