"""Kernels that Triton compiled in a fork server's trial of an engine, kept in memory for its workers.

Triton compiles a kernel at its first use, for which it starts a compiler and an assembler, and looks in a folder
first. A confined worker has that folder for itself and finds it empty. No function can change what others find: the
trial runs no code of functions, and each worker gets a copy. Workers that are not confined share the folder anyway.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...contract.sizes import MIB

LIMIT_BYTES = 64 * MIB
"""A trial compiles a few hundred KiB; with more than this something else is wrong, and none are kept."""
GROUP = "__grp__"
"""Prefix of Triton's files that list the paths of a kernel's other files."""


@dataclass(frozen=True, slots=True)
class CompiledKernels:
    """Files of one of Triton's folders: contents by path inside the folder, which was at `folder`."""

    folder: Path = Path()
    files: Mapping[Path, bytes] = field(default_factory=dict)


def read_kernels(folder: Path, limit_bytes: int = LIMIT_BYTES) -> CompiledKernels:
    """Reads a folder in which Triton has compiled; no kernels if they have more than `limit_bytes`."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    if sum(path.stat().st_size for path in paths) > limit_bytes:
        return CompiledKernels()
    return CompiledKernels(folder, {path.relative_to(folder): path.read_bytes() for path in paths})


def write_kernels(kernels: CompiledKernels, folder: Path) -> None:
    """Puts kernels where Triton looks for them; a file that is there stays. Errors: OSError if it cannot be written."""
    for inside, data in kernels.files.items():
        path = folder / inside
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.name.startswith(GROUP):
            data = data.replace(f"{kernels.folder}/".encode(), f"{folder}/".encode())
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_bytes(data)
        part.replace(path)


_of_trial = CompiledKernels()


def keep_kernels(folder: Path) -> None:
    """Keeps what a trial has compiled into a folder for this process and its forks, and what Triton knows of itself."""
    global _of_trial  # forks inherit it
    with contextlib.suppress(OSError):  # a compiler of a trial that was ended may still write
        _of_trial = read_kernels(folder)
    if _of_trial.files:
        with contextlib.suppress(ImportError, AttributeError):  # a Triton that does this otherwise
            # It reads its compiler, half a GB, once a process.
            importlib.import_module("triton.runtime.cache").triton_key()


def offer_kernels() -> None:
    """Puts the trial's kernels where this process's Triton looks; it compiles for itself if that cannot be."""
    if _of_trial.files:
        with contextlib.suppress(ImportError, AttributeError, OSError):
            write_kernels(_of_trial, Path(importlib.import_module("triton.knobs").cache.dir))
