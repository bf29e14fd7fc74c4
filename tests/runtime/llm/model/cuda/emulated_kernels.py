"""Kernels of decode steps on an emulated device: their own source as C++, each thread block after the other.

What it shows is that indices, shuffles and products of matrices belong together; not what a GPU's memory model allows,
how its units round, or how long it takes.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from torch import Tensor

from fleetstart.runtime.llm.model.cuda.decode_kernels import (
    HEADERS,
    SOURCE,
    DecodeKernels,
    KernelArgument,
    KernelShape,
    c_type,
    definitions,
)

FOLDER = Path(__file__).parent / "emulation"
PROCESSORS = 4


class EmulatedModule:
    """The kernels of one shape, compiled for this machine."""

    def __init__(self, shape: KernelShape) -> None:
        with tempfile.TemporaryDirectory(prefix="fs-kernels-") as folder:
            library = Path(folder) / "kernels.so"
            # Away from the header whose place the emulation's own takes.
            for name in (SOURCE.name, *HEADERS[1:]):
                shutil.copy(SOURCE.with_name(name), folder)
            argv = [os.environ.get("CXX", "c++"), "-std=c++20", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas"]
            argv += [*definitions(shape), f"-I{FOLDER}", f"-I{folder}", f"{FOLDER / 'kernels.cpp'}"]
            compiled = subprocess.run([*argv, "-o", f"{library}"], capture_output=True, text=True)
            assert compiled.returncode == 0, compiled.stderr[:4000]
            self._library = ctypes.CDLL(str(library))

    def launch(self, name: str, grid: tuple[int, int, int], threads: int, *arguments: KernelArgument) -> None:
        values = [c_type(one)(one.data_ptr() if isinstance(one, Tensor) else one) for one in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        assert self._library.launch_kernel(name.encode(), (ctypes.c_int * 3)(*grid), threads, pointers), name


@functools.cache
def emulated_kernels(shape: KernelShape) -> DecodeKernels:
    return DecodeKernels(EmulatedModule(shape), shape, processors=PROCESSORS)
