"""Samples of a soak: what the processes, Redis and the folders of a system hold at one moment, as numbers by name."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import redis

from fleetstart.runtime.contract import redis_keys
from tests.e2e.processes import Process
from tests.e2e.systems import System

ROW = re.compile(r"^\| (fs:\S+) \|", re.MULTILINE)
"""A key's row in the table of `redis_keys`."""
UNKNOWN = "not in the table of keys"
SHARED_MEMORY = Path("/dev/shm")


def families() -> list[tuple[str, str]]:
    """(prefix, family) of each key that the table names, longest prefix first; a key without variables is its own."""
    names = ROW.findall(redis_keys.__doc__ or "")
    return sorted(((name.partition("{")[0], name) for name in names), key=lambda row: -len(row[0]))


def family_of(key: str, known: Iterable[tuple[str, str]]) -> str:
    for prefix, name in known:
        if key == prefix if prefix == name else key.startswith(prefix):
            return name
    return UNKNOWN


def of_redis(client: redis.Redis) -> dict[str, float]:
    """Keys and bytes of each family, and what the server holds in all."""
    known = families()
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for key in client.scan_iter(count=500):
        family = family_of(key.decode(errors="replace"), known)
        used: Any = client.memory_usage(key, samples=0)
        counts[family] += 1
        sizes[family] += used or 0
    memory: Any = client.info("memory")
    found: dict[str, float] = {"redis used_memory bytes": memory["used_memory"]}
    for family, count in counts.items():
        found[f"redis {family} keys"] = count
        found[f"redis {family} bytes"] = sizes[family]
    return found


def of_processes(processes: Iterable[Process]) -> dict[str, float]:
    """Descriptors, anonymous memory and threads, summed over a kind; of workers, which come and go, the largest."""
    found: defaultdict[str, float] = defaultdict(float)
    for process in processes:
        kind = process.kind if len(process.kind) < 20 else "other"
        try:
            descriptors = len(os.listdir(f"/proc/{process.pid}/fd"))
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            continue  # it has ended meanwhile
        values = {
            "fds": descriptors,
            "threads": _field(status, "Threads"),
            "RssAnon KiB": _field(status, "RssAnon"),
        }
        found[f"{kind} processes"] += 1
        for what, value in values.items():
            name = f"{kind} {what}"
            found[name] = max(found[name], value) if kind in ("worker", "child") else found[name] + value
    return dict(found)


def of_folders(home: Path, tmp: Path) -> dict[str, float]:
    """Files and bytes below each folder of the home, and in /dev/shm and the temporary folder."""
    found: dict[str, float] = {}
    folders = [path for path in home.iterdir() if path.is_dir()] if home.exists() else []
    for name, folder in [*((f"home/{path.name}", path) for path in folders), ("/dev/shm", SHARED_MEMORY), ("tmp", tmp)]:
        files, size = 0, 0
        for at, _, names in os.walk(folder):
            for file in names:
                with contextlib.suppress(OSError):
                    size += os.lstat(os.path.join(at, file)).st_size
                    files += 1
        found[f"{name} files"], found[f"{name} bytes"] = files, size
    return found


def sample(system: System) -> dict[str, float]:
    with system.redis() as client:
        in_redis = of_redis(client)
    return {**of_processes(system.processes()), **in_redis, **of_folders(system.home, system.tmp)}


def _field(status: str, name: str) -> float:
    line = next((line for line in status.splitlines() if line.startswith(f"{name}:")), "")
    return float(line.split()[1]) if line else 0.0
