"""Helpers in C beside these scripts, compiled on the spot."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path


def compiled(name: str, *options: str) -> ctypes.CDLL:
    """`name.c` as a library; it stays loaded when its file is gone."""
    with tempfile.TemporaryDirectory(prefix="fs-bench-") as folder:
        library = Path(folder) / f"{name}.so"
        source = Path(__file__).with_name(f"{name}.c")
        subprocess.run(["cc", "-O3", *options, "-shared", "-fPIC", source, "-o", library], check=True)
        return ctypes.CDLL(str(library))
