"""What vLLM's engine is given by the platform, and what is refused before it is asked."""

from __future__ import annotations

import gc
from importlib.util import find_spec

import pytest
import torch

from fleetstart.runtime.contract.errors import InvalidSpec
from fleetstart.runtime.contract.function.spec import LLMSettings
from fleetstart.runtime.llm.server.engines import load_engine
from fleetstart.runtime.llm.vllm_engine.load_format import on_device
from fleetstart.runtime.llm.vllm_engine.loader import _graph_sizes
from tests.runtime.llm.engine.test_adapter_engines import attached, base_of
from tests.runtime.llm.engine.test_inference_engine import SETTINGS


@pytest.mark.parametrize(
    ("max_batch", "sizes"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12])]
)
def test_every_batch_fits_a_graph(max_batch: int, sizes: list[int]) -> None:
    assert _graph_sizes(max_batch) == sizes


def test_weights_without_a_gpu_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    weights, _ = attached(base_of())
    assert on_device(weights) is weights


@pytest.mark.parametrize(("free", "moved"), [(1 << 20, False), (1 << 30, True)])
def test_weights_go_to_a_gpu_that_has_room_for_them_twice(
    monkeypatch: pytest.MonkeyPatch, free: int, moved: bool
) -> None:
    weights, _ = attached(base_of())
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80 << 30))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: 1.0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    monkeypatch.setattr(weights, "to", asked.append)
    assert (on_device(weights) is weights) is not moved
    assert asked == ["cuda"] * moved


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make vllm-test")
def test_adapters_in_fp32_are_refused_on_a_gpu_and_the_collector_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    weights, adapters = attached(base_of())
    collect, graph = gc.collect, torch.cuda.graph
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    with pytest.raises(InvalidSpec, match="bf16 and fp16 alone"):
        load_engine(weights, LLMSettings(engine="vllm", **SETTINGS), threads=1, adapters=adapters)
    monkeypatch.undo()
    loaded = load_engine(weights, LLMSettings(engine="vllm", **SETTINGS), threads=1).engine
    assert (gc.collect, torch.cuda.graph) == (collect, graph)
    loaded.close()
