"""Ceiling of every loader: fio's reads from the disk into huge pages, with its quickest settings here."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BLOCK = "4M"
HUGE_BYTES = 192 << 20
"""What fio's buffers need in huge pages: 16 blocks of 4 MiB, twice, and some."""
TIMEOUT_S = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    bytes_per_s: float
    seconds: float
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    engine: str
    depth: int
    memory: str

    def __str__(self) -> str:
        return f"{self.engine}, {self.depth} × {BLOCK}, --iomem={self.memory}"


def candidates(*, hugetlb: bool) -> list[Settings]:
    """Reserved huge pages where there are some; else what malloc gives, which the report says."""
    memory = "shmhuge" if hugetlb else "malloc"
    return [Settings(engine=name, depth=depth, memory=memory) for name in ("io_uring", "libaio") for depth in (4, 16)]


def installed() -> bool:
    return shutil.which("fio") is not None


def fastest(paths: Sequence[Path], *, hugetlb: bool) -> Settings | None:
    """None where fio is missing or none of its engines may run."""
    found: list[tuple[float, Settings]] = []
    for settings in candidates(hugetlb=hugetlb) if installed() else ():
        with contextlib.suppress(subprocess.CalledProcessError, json.JSONDecodeError, ValueError):
            found.append((read(paths, settings).bytes_per_s, settings))
    return max(found, key=lambda pair: pair[0])[1] if found else None


def read(paths: Sequence[Path], settings: Settings) -> Ceiling:
    """Every byte of the files once, in order, past the page cache. ValueError if fio read something else."""
    size = sum(path.stat().st_size for path in paths)
    with tempfile.NamedTemporaryFile("r", suffix=".json") as out:
        options = {
            "name": "ceiling", "filename": ":".join(map(str, paths)), "readonly": "", "rw": "read", "direct": "1",
            "bs": BLOCK, "ioengine": settings.engine, "iodepth": str(settings.depth), "iomem": settings.memory,
            "file_service_type": "sequential", "output-format": "json", "output": out.name,
        }  # fmt: skip
        argv = ["fio", *(f"--{name}={value}" if value else f"--{name}" for name, value in options.items())]
        subprocess.run(argv, check=True, capture_output=True, timeout=TIMEOUT_S)
        job = json.load(out)["jobs"][0]
    # A file's last piece is shorter than a sector: direct I/O leaves it out.
    if job["error"] or abs(job["read"]["io_bytes"] - size) > len(paths) * (4 << 20):
        raise ValueError(f"fio read {job['read']['io_bytes']:,} of {size:,} bytes, error {job['error']}")
    seconds = job["read"]["runtime"] / 1e3
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return Ceiling(bytes_per_s=job["read"]["io_bytes"] / seconds, seconds=seconds, cpu_s=cpu_s)
