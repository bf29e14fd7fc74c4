"""Compiler of the benchmarks' helpers in C, on the spot."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path


def compiled(source: Path, *options: str) -> ctypes.CDLL:
    """The C file as a library; it stays loaded when its file is gone."""
    with tempfile.TemporaryDirectory(prefix="fs-bench-") as folder:
        library = Path(folder) / f"{source.stem}.so"
        subprocess.run(["cc", "-O3", *options, "-shared", "-fPIC", source, "-o", library], check=True)
        return ctypes.CDLL(str(library))
