"""Kernels of decode steps on CUDA (`decode_kernels.cu`), compiled by NVRTC in the background.

Attention reads keys and values where they lie, by block tables, as PagedAttention does (Kwon et al., SOSP 2023):
nothing is gathered or padded. Each sequence's keys are divided among several thread blocks where there are few
sequences (Flash-Decoding). cuda-python, which torch's CUDA builds need from 2.10 on, compiles and launches; without it,
or for shapes that the kernels are not made for, steps are computed by torch's operations.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ....contract.weights.decoder_config import DecoderConfig

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_suffix(".cu")
HEADERS = ("number_types.cuh", "attention.cuh", "row_kernels.cuh")
"""Files beside it that it includes."""
DTYPES = {torch.float32: "FS_FP32", torch.float16: "FS_FP16", torch.bfloat16: "FS_BF16"}
MOST_GROUPED = 8
"""Query heads of a thread block: their queries and results stay in its registers."""
THREADS, NORM_THREADS = 128, 256
BLOCKS_PER_PROCESSOR = 2
"""Thread blocks for each of the device's multiprocessors that keep its memory busy."""
KERNELS = ("rotate_and_store", "attend", "combine", "normalise", "add_and_normalise", "apply_gates")
LEAST_KEYS = 64
"""Keys of a thread block: fewer cost more to merge than they save."""


KernelArgument = Tensor | int | float


class KernelModule(Protocol):
    """Compiled kernels."""

    def launch(self, name: str, grid: tuple[int, int, int], threads: int, *arguments: KernelArgument) -> None:
        """Launches one on the current stream. Tensors are given by their addresses, numbers as int or float."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelShape:
    """Shape that kernels are compiled for. `grouped`: query heads of a thread block."""

    dtype: torch.dtype
    head_dim: int
    grouped: int
    block_tokens: int


def shape_for(config: DecoderConfig, dtype: torch.dtype, block_tokens: int) -> KernelShape | None:
    """Shape of a model's kernels; None if they are not made for it: lanes of 16 bytes must divide a warp."""
    lanes, rest = divmod(config.head_dim * dtype.itemsize, 16)
    repeats = config.head_count // config.kv_head_count
    if rest or lanes not in (4, 8, 16, 32) or dtype not in DTYPES:
        return None
    grouped = max(count for count in range(1, MOST_GROUPED + 1) if repeats % count == 0)
    return KernelShape(dtype=dtype, head_dim=config.head_dim, grouped=grouped, block_tokens=block_tokens)


def splits_for(rows: int, groups: int, context: int, processors: int) -> int:
    """Parts that each sequence's keys are divided into: as many as keep the device busy."""
    wanted = -(-BLOCKS_PER_PROCESSOR * processors // (rows * groups))
    return max(1, min(wanted, context // LEAST_KEYS))


def in_lanes(tensor: Tensor, lane: int) -> bool:
    """Checks whether each row is contiguous, begins at a multiple of `lane` numbers, and has a multiple of them.

    Shapes:  tensor [width], [rows, width], or [rows, inner, width], where a row is [inner, width].
    """
    strides = tensor.stride()
    return (
        tensor.numel() > 0 and tensor.dim() <= 3 and strides[-1] == 1
        and not tensor.shape[-1] % lane and (tensor.dim() == 1 or not strides[0] % lane)
        and (tensor.dim() < 3 or strides[1] == tensor.shape[2])
        and not tensor.data_ptr() % (lane * tensor.itemsize)
    )  # fmt: skip


@functools.cache
def kernels_for(device: torch.device, shape: KernelShape) -> Future[DecodeKernels | None]:
    """Starts to compile, once for a process; the result is None where that fails, which is logged. `device` has its
    index."""
    future: Future[DecodeKernels | None] = Future()

    def make() -> None:
        try:
            future.set_result(compile_kernels(device, shape))
        except Exception as error:  # whatever a compiler or driver says: torch's operations do the same
            logger.warning("decode steps go on without their own kernels", extra={"error": repr(error)})
            future.set_result(None)

    threading.Thread(target=make, name="llm-kernels", daemon=True).start()
    return future


def compile_kernels(device: torch.device, shape: KernelShape) -> DecodeKernels:
    """Compiles. Errors: ImportError without cuda-python, RuntimeError with the compiler's or driver's words."""
    torch.cuda.set_device(device)  # of this thread: a module belongs to its current context
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return DecodeKernels(_Module(shape, device), shape, processors=processors)


class DecodeKernels:
    """Compiled kernels of one shape. Calls are asynchronous, on the current stream."""

    def __init__(self, module: KernelModule, shape: KernelShape, *, processors: int) -> None:
        """`processors`: the device's multiprocessors."""
        self._module = module
        self._shape = shape
        self._lane = 16 // shape.dtype.itemsize
        """Numbers of 16 bytes, which a thread reads at a time."""
        self._processors = processors

    def rotate_and_store(
        self, query: Tensor, key: Tensor, value: Tensor, turns: tuple[Tensor, Tensor], written: Tensor, cache: Tensor
    ) -> Tensor:
        """Rotated queries; rotated keys and values are in the cache's written slots.

        Shapes:  query [rows, heads, head_dim], key and value [rows, kv_heads, head_dim], whose rows may lie apart;
                 turns [rows, 1, rotary_dim], written [rows], cache [2 * kv_heads, slots, head_dim]. Returns
                 [rows, heads, head_dim].
        """
        cos, sin = turns
        (rows, heads, width), kv_heads = query.shape, key.shape[1]
        rotated = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        threads = (heads + 2 * kv_heads) * (width // self._lane)
        self._module.launch(
            "rotate_and_store", (-(-threads // THREADS), rows, 1), THREADS,
            query, key, value, cos, sin, written, rotated, cache,
            _Long(cache.shape[1]), *(_Long(one.stride(0)) for one in (query, key, value)),
            heads, kv_heads, cos.shape[-1],
        )  # fmt: skip
        return rotated

    def attend(
        self,
        query: Tensor,
        cache: Tensor,
        positions: Tensor,
        tables: Tensor,
        *,
        window: int | None,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """Attention of one query a sequence over its keys up to its position.

        Shapes:  query [rows, heads, head_dim], cache [2 * kv_heads, slots, head_dim], positions [rows] and tables
                 [rows, blocks], whose columns are adjacent. Returns the shape of `query`.
        """
        rows, heads, width = query.shape
        groups = heads // self._shape.grouped
        splits = splits_for(rows, groups, tables.shape[1] * self._shape.block_tokens, self._processors)
        partial = torch.empty(
            (rows, heads, splits, width + 2) if splits > 1 else (0,), dtype=torch.float32, device=query.device
        )
        mixed = torch.empty_like(query)
        self._module.launch(
            "attend", (splits, groups, rows), THREADS,
            query, cache, positions, tables, partial, mixed,
            _Long(cache.shape[1]), positions.stride(0), tables.stride(0), cache.shape[0] // 2,
            window or 0, scale, softcap or 0.0,
        )  # fmt: skip
        if splits > 1:
            self._module.launch("combine", (heads, rows, 1), width, partial, mixed, splits)
        return mixed

    def normalise(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over the last dimension. Shapes: hidden [..., width], weight [width]."""
        width = weight.shape[0]
        inner = hidden.shape[1] if hidden.dim() == 3 else 1
        normed = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        self._module.launch(
            "normalise", (hidden.numel() // width, 1, 1), NORM_THREADS,
            hidden, weight, normed, _Long(hidden.stride(0)), inner, width, eps,
        )  # fmt: skip
        return normed

    def add_and_normalise(self, hidden: Tensor, result: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The sum of the first two, and its RMSNorm, of what `adds` allows. Shapes: hidden and result [rows, width],
        weight [width]."""
        (rows, width), total, normed = hidden.shape, torch.empty_like(hidden), torch.empty_like(hidden)
        self._module.launch(
            "add_and_normalise", (rows, 1, 1), NORM_THREADS, hidden, result, weight, total, normed, width, eps
        )
        return total, normed

    def apply_gates(self, gate: Tensor, up: Tensor, *, tanh_gelu: bool) -> Tensor:
        """SiLU, or GELU by its approximation with tanh, of `gate`, times `up`. Shapes: [rows, width]."""
        rows, width = gate.shape
        out = torch.empty((rows, width), dtype=gate.dtype, device=gate.device)
        parts = -(-width // (NORM_THREADS * self._lane))
        self._module.launch(
            "apply_gates", (parts, rows, 1), NORM_THREADS,
            gate, up, out, _Long(gate.stride(0)), _Long(up.stride(0)), width, int(tanh_gelu),
        )  # fmt: skip
        return out

    def takes(self, *tensors: Tensor) -> bool:
        """Checks whether the kernels over rows take these, a weight, or matrices whose rows may lie apart."""
        return all(one.dtype == self._shape.dtype and in_lanes(one, self._lane) for one in tensors)

    def adds(self, hidden: Tensor, result: Tensor, weight: Tensor) -> bool:
        """Checks whether `add_and_normalise` is made for these."""
        return self.takes(hidden, result, weight) and hidden.is_contiguous() and result.is_contiguous()


class _Long(int):
    """A number that a kernel takes as 64 bits."""


class _Module:
    """Compiled code in the device's context, and its functions by name."""

    def __init__(self, shape: KernelShape, device: torch.device) -> None:
        from cuda.bindings import driver  # type: ignore[import-not-found, unused-ignore]

        self._driver, self._device = driver, device
        self._binary = _compiled(shape, device)
        self._loaded = _checked(driver.cuModuleLoadData(self._binary))
        self._functions = {name: _checked(driver.cuModuleGetFunction(self._loaded, name.encode())) for name in KERNELS}

    def launch(self, name: str, grid: tuple[int, int, int], threads: int, *arguments: KernelArgument) -> None:
        """Launches on the current stream. Tensors are given by their addresses, numbers as int or float."""
        values = tuple(one.data_ptr() if isinstance(one, Tensor) else one for one in arguments)
        types = tuple(c_type(one) for one in arguments)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        _checked(self._driver.cuLaunchKernel(
            self._functions[name], *grid, threads, 1, 1, 0, stream, (values, types), 0
        ))  # fmt: skip


def c_type(argument: KernelArgument) -> Any:
    """Type of C that an argument has."""
    if isinstance(argument, Tensor):
        return ctypes.c_void_p
    if isinstance(argument, float):
        return ctypes.c_float
    return ctypes.c_longlong if isinstance(argument, _Long) else ctypes.c_int


def definitions(shape: KernelShape) -> list[str]:
    """The compiler's options that say the shape."""
    return [
        f"-D{DTYPES[shape.dtype]}", f"-DFS_HEAD_DIM={shape.head_dim}", f"-DFS_GROUP={shape.grouped}",
        f"-DFS_BLOCK_TOKENS={shape.block_tokens}", f"-DFS_THREADS={THREADS}", f"-DFS_NORM_THREADS={NORM_THREADS}",
    ]  # fmt: skip


def _compiled(shape: KernelShape, device: torch.device) -> bytes:
    """Machine code for the device. Errors: RuntimeError with the compiler's log."""
    from cuda.bindings import nvrtc

    major, minor = torch.cuda.get_device_capability(device)
    options = [f"--gpu-architecture=sm_{major}{minor}", *definitions(shape)]
    headers = [SOURCE.with_name(name).read_bytes() for name in HEADERS]
    program = _checked(nvrtc.nvrtcCreateProgram(
        SOURCE.read_bytes(), SOURCE.name.encode(), len(headers), headers, [name.encode() for name in HEADERS]
    ))  # fmt: skip
    try:
        encoded = [option.encode() for option in options]
        (code,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if int(code):
            log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
            _checked(nvrtc.nvrtcGetProgramLog(program, log))
            raise RuntimeError(f"{SOURCE.name} does not compile: {log.decode(errors='replace')[:2000]}")
        binary = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, binary))
        return bytes(binary)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _checked(answer: Any) -> Any:
    """Result of a call of cuda-python, without its error code. Errors: RuntimeError with the code's name."""
    code, *values = answer
    if int(code):
        raise RuntimeError(f"CUDA: {code.name}")
    return values[0] if values else None
