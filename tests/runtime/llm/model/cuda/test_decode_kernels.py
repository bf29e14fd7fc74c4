"""Kernels of decode steps compute what torch's operations do, for every shape that they are made for: on CUDA, and as
C++ on an emulated device."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from fleetstart.runtime.llm.model.cuda.decode_kernels import (
    LEAST_KEYS,
    MOST_GROUPED,
    DecodeKernels,
    KernelShape,
    in_lanes,
    kernels_for,
    shape_for,
    splits_for,
)
from fleetstart.runtime.llm.model.layers import rms_norm
from fleetstart.runtime.llm.model.torch_steps import rotated
from tests.runtime.llm.model.cuda.emulated_kernels import emulated_kernels
from tests.runtime.llm.models import config_of, tiny

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
BLOCK_TOKENS, BLOCKS = 16, 96
CLOSE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SHAPES = [
    (torch.float16, 128, 8, 2), (torch.bfloat16, 128, 8, 8), (torch.bfloat16, 64, 9, 3), (torch.float32, 16, 6, 2),
    (torch.bfloat16, 256, 16, 1), (torch.float32, 128, 5, 1), (torch.float16, 32, 24, 2),
]  # fmt: skip
"""Dtype, head_dim, heads, kv_heads."""


def test_shapes_that_do_not_fill_lanes_have_no_kernels() -> None:
    config = config_of(tiny())
    for head_dim, dtype, there in (
        (64, torch.bfloat16, True), (128, torch.float16, True), (16, torch.float32, True), (256, torch.float32, False),
        (80, torch.bfloat16, False), (96, torch.float16, False), (16, torch.float16, False),
    ):  # fmt: skip
        shape = shape_for(replace(config, head_dim=head_dim), dtype, BLOCK_TOKENS)
        assert (shape is not None) is there, (head_dim, dtype)


@given(heads=st.integers(1, 96), kv_heads=st.integers(1, 16))
def test_heads_of_a_thread_block_share_one_key_value_head(heads: int, kv_heads: int) -> None:
    config = replace(config_of(tiny()), head_count=heads * kv_heads, kv_head_count=kv_heads, head_dim=64)
    shape = shape_for(config, torch.bfloat16, BLOCK_TOKENS)
    assert shape is not None
    assert 1 <= shape.grouped <= MOST_GROUPED
    assert heads % shape.grouped == 0


@given(
    rows=st.integers(1, 256), groups=st.integers(1, 64), context=st.integers(1, 1 << 17), processors=st.integers(1, 200)
)
def test_keys_are_divided_only_where_the_device_would_idle(
    rows: int, groups: int, context: int, processors: int
) -> None:
    splits = splits_for(rows, groups, context, processors)
    assert splits == 1 or context // splits >= LEAST_KEYS
    assert splits == 1 or rows * groups * (splits - 1) < 2 * processors


@pytest.fixture(
    params=[pytest.param("emulated", marks=pytest.mark.slow), pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device("cuda", 0) if request.param == "cuda" else torch.device("cpu")


def _kernels(device: torch.device, dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int) -> DecodeKernels:
    config = replace(config_of(tiny()), head_count=heads, kv_head_count=kv_heads, head_dim=head_dim)
    shape = shape_for(config, dtype, BLOCK_TOKENS)
    assert isinstance(shape, KernelShape)
    if device.type == "cpu":
        return emulated_kernels(shape)
    kernels = kernels_for(device, shape).result()
    assert kernels is not None, "see the log"
    return kernels


def _noise(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def _wanted(query: Tensor, cache: Tensor, slots: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Attention of one query [heads, head_dim] over slots, in double precision."""
    keys, values = cache[:, slots].double().view(2, -1, len(slots), cache.shape[2])
    repeats = query.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(repeats, 0), values.repeat_interleave(repeats, 0)
    scores = (keys @ query.double()[:, :, None])[..., 0] * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    mixed: Tensor = (scores.softmax(-1)[:, None] @ values)[:, 0]
    return mixed


@pytest.mark.parametrize(("dtype", "head_dim", "heads", "kv_heads"), SHAPES)
@pytest.mark.parametrize("more", [{}, {"window": 20}, {"softcap": 5.0}], ids=["plain", "window", "cap"])
def test_attention_is_that_of_each_sequence_alone(
    device: torch.device, dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int, more: dict[str, Any]
) -> None:
    """Slots of no sequence are NaN; rows of tables are part of a wider tensor, as in a graph."""
    kernels = _kernels(device, dtype, head_dim, heads, kv_heads)
    options = {"window": None, "softcap": None} | more
    for contexts in ([1], [3, 700], [16, 17, 240, 5, 64, 65, 1, 33, 128]):
        rows = len(contexts)
        query = _noise(rows, heads, head_dim, dtype=dtype, device=device, seed=rows)
        cache = torch.full((2 * kv_heads, BLOCKS * BLOCK_TOKENS, head_dim), math.nan, dtype=dtype, device=device)
        order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(rows)).tolist()
        inputs = torch.zeros((rows, 2 + 64), dtype=torch.long)
        slots = []
        for row, context in enumerate(contexts):
            own = [order.pop() for _ in range(-(-context // BLOCK_TOKENS))]
            inputs[row, 1], inputs[row, 2 : 2 + len(own)] = context - 1, torch.tensor(own)
            places = torch.arange(context)
            mine = torch.tensor(own)[places // BLOCK_TOKENS] * BLOCK_TOKENS + places % BLOCK_TOKENS
            cache[:, mine] = _noise(2 * kv_heads, context, head_dim, dtype=dtype, device=device, seed=row)
            slots.append(mine[-options["window"] :] if options["window"] else mine)
        there = inputs.to(device)
        got = kernels.attend(query, cache, there[:, 1], there[:, 2:], scale=head_dim**-0.5, **options)
        for row in range(rows):
            wanted = _wanted(query[row], cache, slots[row], head_dim**-0.5, options["softcap"])
            torch.testing.assert_close(got[row].double(), wanted, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize(("dtype", "head_dim", "heads", "kv_heads"), SHAPES)
@pytest.mark.parametrize("share", [1.0, 0.5, 0.375], ids=["whole", "half", "no lanes"])
@pytest.mark.parametrize("joined", [False, True], ids=["apart", "joined"])
def test_keys_are_rotated_and_stored_with_values(
    device: torch.device, dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int, share: float, joined: bool
) -> None:
    kernels, rows, width = _kernels(device, dtype, head_dim, heads, kv_heads), 5, int(head_dim * share)
    query = _noise(rows, heads, head_dim, dtype=dtype, device=device)
    key, value = (_noise(rows, kv_heads, head_dim, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    if joined:
        together = torch.cat([one.flatten(1) for one in (key, query, value)], dim=1)
        parts = torch.split(together, [kv_heads * head_dim, heads * head_dim, kv_heads * head_dim], dim=1)
        key, query, value = (part.view(rows, -1, head_dim) for part in parts)
    angles = _noise(rows, 1, width // 2, dtype=torch.float32, device=device, seed=3)
    turns = tuple(torch.cat(pair, -1).to(dtype) for pair in ((angles.cos(),) * 2, (-angles.sin(), angles.sin())))
    written = torch.tensor([7, 80, 3, 0, 95], device=device)
    cache = torch.zeros((2 * kv_heads, 96, head_dim), dtype=dtype, device=device)
    got = kernels.rotate_and_store(query, key, value, turns, written, cache)  # type: ignore[arg-type]
    close = CLOSE[dtype]
    torch.testing.assert_close(got, rotated(query, *turns), rtol=close, atol=close)
    wanted = rotated(key, *turns).transpose(0, 1)
    torch.testing.assert_close(cache[:kv_heads, written], wanted, rtol=close, atol=close)
    assert torch.equal(cache[kv_heads:, written], value.transpose(0, 1))
    untouched = torch.ones(96, dtype=torch.bool)
    untouched[written.cpu()] = False
    assert not cache[:, untouched.to(device)].any()


@pytest.mark.parametrize("dtype", CLOSE)
def test_norms_are_those_of_torch(device: torch.device, dtype: torch.dtype) -> None:
    kernels = _kernels(device, dtype, 128, 8, 2)
    for shape in ((1, 64), (3, 4096), (7, 576), (5, 6, 128)):
        hidden, weight = (
            _noise(*shape, dtype=dtype, device=device),
            _noise(shape[-1], dtype=dtype, device=device, seed=1),
        )
        assert kernels.takes(hidden, weight)
        wanted = rms_norm(hidden.float(), weight.float(), 1e-5).to(dtype)
        torch.testing.assert_close(
            kernels.normalise(hidden, weight, 1e-5), wanted, rtol=CLOSE[dtype], atol=CLOSE[dtype]
        )
    assert not kernels.takes(hidden, weight.double())
    assert not kernels.takes(hidden.transpose(0, 1), weight)


@pytest.mark.parametrize("dtype", CLOSE)
def test_heads_in_wider_rows_are_normalised_where_they_lie(device: torch.device, dtype: torch.dtype) -> None:
    kernels, close = _kernels(device, dtype, 128, 8, 2), CLOSE[dtype]
    rows, weight = _noise(5, 12 * 128, dtype=dtype, device=device), _noise(128, dtype=dtype, device=device, seed=1)
    for heads in (rows[:, : 8 * 128].view(5, 8, 128), rows[:, 8 * 128 : 10 * 128].view(5, 2, 128)):
        assert kernels.takes(heads, weight)
        wanted = rms_norm(heads.float(), weight.float(), 1e-5).to(dtype)
        got = kernels.normalise(heads, weight, 1e-5)
        assert got.is_contiguous()
        torch.testing.assert_close(got, wanted, rtol=close, atol=close)


@pytest.mark.parametrize("dtype", CLOSE)
def test_a_sum_and_its_norm_are_those_of_two_operations(device: torch.device, dtype: torch.dtype) -> None:
    kernels = _kernels(device, dtype, 128, 8, 2)
    for rows, width in ((1, 64), (3, 4096), (64, 576), (2, 8192)):
        hidden, result = (
            _noise(rows, width, dtype=dtype, device=device),
            _noise(rows, width, dtype=dtype, device=device, seed=2),
        )
        weight = _noise(width, dtype=dtype, device=device, seed=1)
        assert kernels.adds(hidden, result, weight)
        total, normed = kernels.add_and_normalise(hidden, result, weight, 1e-5)
        assert torch.equal(total, hidden + result)
        assert torch.equal(normed, kernels.normalise(total, weight, 1e-5))
    wide = _noise(4, 2 * 64, dtype=dtype, device=device)
    assert not kernels.adds(wide[:, :64], wide[:, 64:], _noise(64, dtype=dtype, device=device))


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("tanh_gelu", [False, True], ids=["silu", "gelu"])
def test_gates_are_those_of_torch(device: torch.device, dtype: torch.dtype, tanh_gelu: bool) -> None:
    kernels, close = _kernels(device, dtype, 128, 8, 2), CLOSE[dtype]
    for rows, width in ((1, 64), (3, 14336), (64, 1536)):
        both = 4 * _noise(rows, 2 * width, dtype=dtype, device=device)
        for gate, up in ((both[:, :width], both[:, width:]), (both[:, :width].contiguous(), both[:, width:])):
            assert kernels.takes(gate, up)
            active = functional.gelu(gate.float(), approximate="tanh") if tanh_gelu else functional.silu(gate.float())
            wanted = (active.to(dtype).float() * up.float()).to(dtype)
            got = kernels.apply_gates(gate, up, tanh_gelu=tanh_gelu)
            torch.testing.assert_close(got, wanted, rtol=close, atol=close)


def test_rows_in_lanes() -> None:
    whole = torch.zeros(6, 64)
    for taken in (whole, whole[0], whole[:, 8:24], whole[1:], whole.view(6, 4, 16), whole[:, :32].view(6, 2, 16)):
        assert in_lanes(taken, 8), (taken.shape, taken.stride())
    for other in (
        whole[:, 1:9], whole[:, :12], whole.t(), whole[:, ::2], whole[:0], whole.view(2, 3, 4, 16),
        whole.view(6, 4, 16).transpose(0, 1), torch.zeros(6, 60)[:, :8],
    ):  # fmt: skip
        assert not in_lanes(other, 8), (other.shape, other.stride())
