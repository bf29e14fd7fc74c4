"""Memory bandwidth of this machine, the ceiling of every decoder: measured with a reader in C compiled on the spot."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tests.bench.harness.compiled import compiled

READS = 3
"""A ceiling: the best of a few."""
BUFFER_BYTES = 256 << 20


class Reader:
    def __init__(self) -> None:
        self._read = compiled(Path(__file__).with_name("read.c"), "-march=native").read_all
        self._read.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._read.restype = ctypes.c_uint64
        self._buffer = torch.ones(BUFFER_BYTES, dtype=torch.uint8)

    def bytes_per_s(self, threads: int) -> float:
        """Each thread reads its own part of memory that no cache holds."""
        share = BUFFER_BYTES // threads
        starts = [self._buffer.data_ptr() + number * share for number in range(threads)]
        with ThreadPoolExecutor(threads) as team:
            took_s = min(
                _time(lambda: list(team.map(lambda start: self._read(start, share), starts))) for _ in range(READS)
            )
        return threads * share / took_s


def copy_on_gpu_bytes_per_s() -> float:
    """A copy inside the GPU's memory; what is read and what is written both count."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize()

    return 2 * source.nbytes / min(_time(copy) for _ in range(READS))


def _time(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s
