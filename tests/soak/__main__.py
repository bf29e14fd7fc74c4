"""Soak: load with a bounded rate for hours, samples of everything that could leak, and a verdict on each.

    python -m tests.soak --hours 2 --per-s 5 --out build/soak.json

Root gives it a /dev/shm of its own, so that other programs' files do not count. Ends with 1 if a series grows or a
call was answered wrongly.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec

from tests.e2e.systems import running
from tests.soak.load import Load
from tests.soak.samples import sample
from tests.soak.verdict import Series, Verdict, judge, table

OWN = "FS_SOAK_OWN_SHM"
WRONG_SHOWN = 20
PAGE = 4096.0
LEAST = {"fds": 6, "threads": 3, "processes": 2, "keys": 8, "files": 8, "bytes": 32 * 1024, "KiB": 2048}
"""By the last word of a series' name: growth that means nothing."""
PER_CALL: dict[str, float] = {}
"""Bytes, keys or files a call that are kept for users, for a day or longer: see docs/testing.md."""
SETTINGS = {"FS_SEGMENT_ROWS": "500"}
"""Compactions come often, so that the ledger's share of Redis is flat within minutes."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Load for hours, and what grows of it.")
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--per-s", type=float, default=5.0, help="operations a second")
    parser.add_argument("--every-s", type=float, default=20.0, help="time between samples")
    parser.add_argument("--deploy-every-s", type=float, default=120.0)
    parser.add_argument("--no-model", action="store_true", help="without a language model")
    parser.add_argument("--out", type=Path, help="write samples and verdicts as JSON, after each sample")
    options = parser.parse_args()
    if os.geteuid() == 0 and OWN not in os.environ:
        return _in_own_shm()
    return _soak(options)


def _in_own_shm() -> int:
    script = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
    argv = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-m", "tests.soak", *sys.argv[1:]]
    return subprocess.run(argv, env={**os.environ, OWN: "1"}).returncode


def _soak(options: argparse.Namespace) -> int:
    length_s = options.hours * 3600
    env = {**SETTINGS, "FS_PROFILES": "python" if options.no_model else "python,torch"}
    points: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    with running(env=env) as system:
        load = Load(system, per_s=options.per_s, deploy_every_s=options.deploy_every_s, model=not options.no_model)
        load.prepare(model=not options.no_model)
        load.start()
        began_s = time.monotonic()
        warm_calls = 0
        try:
            while (at_s := time.monotonic() - began_s) < length_s:
                if at_s < _warmup_s(length_s):
                    warm_calls = load.calls
                for name, value in sample(system).items():
                    points[name].append((at_s, value))
                _write(options.out, _record(at_s, load, points, []))
                print(f"{at_s:6.0f} s  {load.done.total()} operations, {len(load.wrong)} wrong", flush=True)
                time.sleep(max(0.0, options.every_s - (time.monotonic() - began_s - at_s)))
        finally:
            load.stop()
        took_s = time.monotonic() - began_s
    calls = load.calls - warm_calls
    verdicts = verdict(points, length_s=length_s, calls=calls)
    print(table(verdicts, calls=calls))
    print(f"{took_s / 60:.0f} minutes, {dict(load.done)}; wrong: {len(load.wrong)}")
    print("\n".join(load.wrong[:WRONG_SHOWN]))
    _write(options.out, _record(took_s, load, points, verdicts))
    return 1 if load.wrong or not all(one.flat for one in verdicts) else 0


def verdict(points: dict[str, list[tuple[float, float]]], *, length_s: float, calls: int) -> list[Verdict]:
    """A verdict on each series; one that has no value at some moment was 0 there."""
    moments = sorted({at_s for series in points.values() for at_s, _ in series})
    found = []
    for name, known in sorted(points.items()):
        values = dict(known)
        series = Series(
            name=name,
            points=[(at_s, values.get(at_s, 0.0)) for at_s in moments],
            least=LEAST.get(name.rpartition(" ")[2], 0.0),
            per_call=PER_CALL.get(name, 0.0),
        )
        found.append(judge(series, warmup_s=_warmup_s(length_s), calls=calls))
    return found


def _warmup_s(length_s: float) -> float:
    """Caches fill, allocators settle and the first compactions run: a third of a soak, 15 minutes at most."""
    return min(length_s / 3, 900.0)


def _record(
    took_s: float, load: Load, points: dict[str, list[tuple[float, float]]], verdicts: list[Verdict]
) -> dict[str, Any]:
    return {
        "minutes": round(took_s / 60, 1),
        "operations": dict(load.done),
        "wrong": load.wrong,
        "verdicts": verdicts,
        "points": {name: [(round(at_s), value) for at_s, value in series] for name, series in points.items()},
    }


def _write(path: Path | None, record: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(record) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
