"""Arguments and dtypes of vLLM's engine by its device, room for its weights, and what building one leaves in place."""

from __future__ import annotations

import gc
from importlib.util import find_spec

import pytest
import torch

from fleetstart.runtime.contract.errors import InvalidSpec
from fleetstart.runtime.contract.function.spec import LLMSettings
from fleetstart.runtime.contract.sizes import GIB
from fleetstart.runtime.llm.server.engines import load_engine
from fleetstart.runtime.llm.vllm_engine.device_arguments import device_arguments, dtype_of, refuse_adapters_in_fp32
from fleetstart.runtime.llm.vllm_engine.load_format import ROOM_BYTES, has_room, on_device
from tests.runtime.llm.engine.test_adapter_engines import attached, base_of
from tests.runtime.llm.engine.test_inference_engine import SETTINGS


@pytest.mark.parametrize(
    ("max_batch", "sizes"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12])]
)
def test_every_batch_fits_a_graph_on_a_gpu(max_batch: int, sizes: list[int]) -> None:
    assert device_arguments(max_batch, on_cpu=False)["compilation_config"]["cudagraph_capture_sizes"] == sizes


def test_a_step_holds_the_whole_batch() -> None:
    assert device_arguments(8, on_cpu=False)["max_num_batched_tokens"] == 2048
    assert device_arguments(3000, on_cpu=False)["max_num_batched_tokens"] == 3000


def test_processors_have_neither_graphs_nor_a_compiler() -> None:
    assert device_arguments(8, on_cpu=True) == {"enforce_eager": True}


@pytest.mark.parametrize(
    ("wanted", "stored", "on_cpu", "dtype"),
    [
        ("auto", "bf16", False, "bfloat16"),
        ("auto", "fp32", False, "float32"),
        ("auto", "bf16", True, "float32"),
        ("fp16", "bf16", False, "float16"),
        ("bf16", "fp32", True, "bfloat16"),
    ],
)
def test_auto_is_as_stored_and_fp32_on_processors(wanted: str, stored: str, on_cpu: bool, dtype: str) -> None:
    assert dtype_of(wanted, stored, on_cpu=on_cpu) == dtype


def test_adapters_in_fp32_are_refused_on_a_gpu_alone() -> None:
    with pytest.raises(InvalidSpec, match="bf16 and fp16 alone"):
        refuse_adapters_in_fp32("float32", on_cpu=False)
    refuse_adapters_in_fp32("float32", on_cpu=True)
    refuse_adapters_in_fp32("bfloat16", on_cpu=False)


@pytest.mark.parametrize(
    ("free", "share", "used", "room"),
    [
        (2 * GIB + ROOM_BYTES, 80 * GIB, 0, True),
        (2 * GIB + ROOM_BYTES - 1, 80 * GIB, 0, False),
        (80 * GIB, 4 * GIB + ROOM_BYTES, 2 * GIB, True),
        (80 * GIB, 4 * GIB + ROOM_BYTES, 2 * GIB + 1, False),
    ],
)
def test_weights_fit_once_more_into_what_is_free_and_the_share_that_is_left(
    free: int, share: int, used: int, room: bool
) -> None:
    assert has_room(weights_bytes=2 * GIB, free_bytes=free, share_bytes=share, used_bytes=used) is room


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_weights_without_a_gpu_stay_where_they_are() -> None:
    weights, _ = attached(base_of())
    assert on_device(weights) is weights


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make vllm-test")
def test_what_is_replaced_while_it_is_built_is_back() -> None:
    before = gc.collect, torch.cuda.graph, torch.set_num_threads
    weights, _ = attached(base_of())
    loaded = load_engine(weights, LLMSettings(engine="vllm", **SETTINGS), threads=1).engine
    assert (gc.collect, torch.cuda.graph, torch.set_num_threads) == before
    loaded.close()
