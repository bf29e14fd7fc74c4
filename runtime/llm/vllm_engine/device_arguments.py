"""Arguments of vLLM's engine by the device that it computes on. Pure: `on_cpu` says whether that is a processor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...contract.errors import InvalidSpec
from ..model.loader import CUDA_STEP_TOKENS

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Names of dtypes, ours and vLLM's."""
LEAST_UTILIZATION = 0.01
"""Part of the whole GPU that vLLM wants to be free at its start. Its KV cache has a size of its own, and other workers,
and the engine behind which this one comes up, have memory there too."""


def dtype_of(wanted: str, stored: str, *, on_cpu: bool) -> str:
    """vLLM's name of the arithmetic's dtype. "auto" is as stored, which vLLM by itself does not take for fp32; on
    processors it is fp32, which all compute fast."""
    if wanted != "auto":
        return DTYPES[wanted]
    return DTYPES["fp32" if on_cpu else stored]


def refuse_adapters_in_fp32(dtype: str, *, on_cpu: bool) -> None:
    """Errors: InvalidSpec for adapters in vLLM's float32 on a GPU, for which it has no kernels."""
    if dtype == DTYPES["fp32"] and not on_cpu:
        raise InvalidSpec("llm: on a GPU vLLM applies adapters in bf16 and fp16 alone", hint='give it dtype="bf16"')


def device_arguments(max_batch: int, *, on_cpu: bool) -> Mapping[str, Any]:
    """Arguments of `EngineArgs`. Compiled kernels take longer to make than they save in a worker's first minutes; on a
    GPU decode steps are graphs, which take a second and without which the host is slower than the device."""
    if on_cpu:
        return {"enforce_eager": True}
    # Numbers of sequences that get a graph: powers of two, and the largest batch.
    sizes = sorted({1 << bits for bits in range(max_batch.bit_length())} | {max_batch})
    return {
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes},
        "max_num_batched_tokens": max(CUDA_STEP_TOKENS, max_batch),
        "gpu_memory_utilization": LEAST_UTILIZATION,
    }
