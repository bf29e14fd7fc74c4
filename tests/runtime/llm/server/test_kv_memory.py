"""Memory for keys and values that a function leaves open: what the weights leave; an error where they leave none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract.errors import DeviceOutOfMemory
from fleetstart.runtime.contract.function.spec import DEFAULT_KV_BYTES, LLMSettings
from fleetstart.runtime.contract.sizes import GIB, MIB
from fleetstart.runtime.llm.server.engines import load_engine
from fleetstart.runtime.llm.server.kv_memory import RESERVED_LEAST_BYTES, kv_budget, with_kv_memory
from fleetstart.runtime.weights.weights import Weights
from tests.runtime.llm.models import tiny
from tests.runtime.segments import Segment

OPEN = LLMSettings(kv_memory_bytes=0, dtype="auto")
sizes = st.integers(0, 200 * GIB)


@given(share=sizes, used=sizes, free=sizes, weights=sizes)
def test_weights_keys_and_values_fit_the_share_and_the_device(share: int, used: int, free: int, weights: int) -> None:
    budget = kv_budget(share_bytes=share, used_bytes=used, free_bytes=free, weights_bytes=weights)
    assert budget >= 0
    if budget:
        assert used + weights + budget + RESERVED_LEAST_BYTES <= share
        assert weights + budget + RESERVED_LEAST_BYTES <= free


def _weights(dtype: str = "F16", said: str = "float16") -> Weights:
    """4 MiB, of which no byte has arrived; the configuration is there."""
    config = b'{"dtype": "%s"}' % said.encode() if said else b"{}"
    shape = (2 << 10, 512 if dtype == "F32" else 1024)
    segment = Segment({"a": (dtype, shape)}, {"config.json": config}, chunk_bytes=MIB)
    segment.fill(segment.chunks[-1])
    return segment.attach(timeout_s=0.01)


def _on_a_gpu(monkeypatch: pytest.MonkeyPatch, *, free: int, whole: int, fraction: float) -> None:
    answers: dict[str, Any] = {
        "is_available": True, "mem_get_info": (free, whole), "get_per_process_memory_fraction": fraction,
        "memory_reserved": 0,
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda answer=answer: answer)


@pytest.mark.parametrize(
    ("dtype", "stored", "said", "taken_mib"),
    [
        ("auto", "F16", "float16", 4),
        ("fp16", "F16", "float16", 4),
        ("bf16", "F16", "float16", 4 + 4),
        ("fp32", "F16", "float16", 4 + 8),
        ("fp32", "F32", "float32", 4),
        ("auto", "F16", "", 4 + 8),  # fp32, since the configuration does not say
    ],
)
def test_it_is_what_the_weights_leave_of_the_workers_share(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, stored: str, said: str, taken_mib: int
) -> None:
    _on_a_gpu(monkeypatch, free=7 * GIB, whole=8 * GIB, fraction=0.25)
    settings = LLMSettings(kv_memory_bytes=0, dtype=dtype)
    left = with_kv_memory(settings, _weights(stored, said), engines=1).kv_memory_bytes
    assert left == (2048 - 512 - taken_mib) * MIB


def test_each_engine_that_holds_the_weights_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    _on_a_gpu(monkeypatch, free=7 * GIB, whole=8 * GIB, fraction=0.25)
    assert with_kv_memory(OPEN, _weights(), engines=3).kv_memory_bytes == (2048 - 512 - 3 * 4) * MIB
    two = LLMSettings(kv_memory_bytes=0, dtype="auto", engine="vllm", first="native")
    assert with_kv_memory(two, _weights(), engines=2).kv_memory_bytes == (2048 - 512 - 2 * 4) * MIB // 2
    told = LLMSettings(kv_memory_bytes=5 * MIB)
    assert with_kv_memory(told, _weights(), engines=1) is told


def test_weights_that_leave_nothing_ask_for_a_larger_share(monkeypatch: pytest.MonkeyPatch) -> None:
    _on_a_gpu(monkeypatch, free=7 * GIB, whole=8 * GIB, fraction=1 / 16)
    with pytest.raises(DeviceOutOfMemory, match=r"weights of 4 MiB leave no memory .* in a share of 512 MiB"):
        with_kv_memory(OPEN, _weights(), engines=1)


def test_without_a_gpu_it_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert with_kv_memory(OPEN, tiny(), engines=1).kv_memory_bytes == DEFAULT_KV_BYTES
    loaded = load_engine(tiny(), LLMSettings(kv_memory_bytes=0, max_batch=2, max_context_tokens=64), threads=1)
    assert loaded.engine.load.block_count == 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_it_is_enough_for_the_whole_batch() -> None:
    loaded = load_engine(tiny(), LLMSettings(kv_memory_bytes=0, max_batch=64, max_context_tokens=512), threads=1)
    assert loaded.engine.load.block_count == 64 * 32
