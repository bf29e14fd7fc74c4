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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fleetstart.controller.billing.archive_store import KEPT_SEGMENTS
from tests.controller.billing.rows import ROW_BYTES
from tests.e2e.systems import running
from tests.soak.load import Load
from tests.soak.samples import sample
from tests.soak.verdict import Series, Verdict, judge, table

OWN = "FS_SOAK_OWN_SHM"
WRONG_SHOWN = 20
PAGE = 4096.0
LEAST = {"fds": 6, "threads": 3, "processes": 2, "keys": 8, "files": 8, "bytes": 32 * 1024, "KiB": 2048}
"""By the last word of a series' name: growth that means nothing."""
PER_CALL: dict[str, float] = {
    # For a day, each call: its trace; each call with a key: its answer.
    "redis fs:trace:{invocation} keys": 1.1,
    "redis fs:trace:{invocation} bytes": 1200,
    "redis fs:idempotency:{digest} keys": 0.15,
    "redis fs:idempotency:{digest} bytes": 120,
    # For an hour: ids of rows, which make writes idempotent. Logs up to the budgets of a function and its project.
    "redis fs:ledger:ids bytes": 130,
    "redis fs:logs:{function} bytes": 220,
    # Each deploy: a version, its bundle in the store and on the node's disk.
    "redis fs:versions:{name} bytes": 12,
    "home/node files": 0.003,
    "home/store files": 0.008,
    "home/store bytes": 100,
    # All of the above together, and Redis' own file of it, which it writes anew at 64 MiB.
    "redis used_memory bytes": 1800,
    "redis RssAnon KiB": 2.0,
    "home/redis bytes": 6500,
    # Logs of the services, up to the size at which they are rotated.
    "home/logs bytes": 40,
}
"""Bytes, keys or files a call that are kept by design, at the mix of calls and deploys of `load`."""
PER_START: dict[str, float] = {
    # For a day, each start: its plan and what was learnt of it. A deploy starts a worker, or two with a canary.
    "redis fs:plan:{worker} keys": 1.3,
    "redis fs:plan:{worker} bytes": 1400,
    "redis fs:learned:{worker}:{what} keys": 2.6,
    "redis fs:learned:{worker}:{what} bytes": 200,
    "home/logs bytes": 1000,
    # The audit log has the deploys, up to 20,000 rows.
    "redis fs:audit bytes": 100,
}
"""The same for each cold call and each deploy, which come by the clock, however many other calls there are."""
PER_HOUR: dict[str, float] = {
    # Minutes of each function, whose hashes expire.
    "redis fs:history:{resolution}:{function}:{number} bytes": 40_000,
}
SEGMENT_ROWS = 500
SETTINGS = {"FS_SEGMENT_ROWS": str(SEGMENT_ROWS)}
"""Compactions come often, so that the ledger's share of Redis is flat within minutes."""
BOUNDED: dict[str, float] = {
    # Rows of the archive's last segments, which fill as questions about usage go through more and more of them: those
    # that are cached, one that is being read, and the holes that it leaves.
    "controller RssAnon KiB": (KEPT_SEGMENTS + 2) * SEGMENT_ROWS * ROW_BYTES / 1024,
}
"""Growth that ends by itself: caches with a bound, which fill later than the warm-up ends. The bounds have tests."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Load for hours, and what grows of it.")
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--per-s", type=float, default=5.0, help="operations a second")
    parser.add_argument("--every-s", type=float, default=20.0, help="time between samples")
    parser.add_argument("--deploy-every-s", type=float, default=120.0)
    parser.add_argument("--no-model", action="store_true", help="without a language model")
    parser.add_argument("--out", type=Path, help="write samples and verdicts as JSON, after each sample")
    parser.add_argument(
        "--judge", type=Path, help="no soak: the verdict on the samples of one, which --out has written"
    )
    options = parser.parse_args()
    if options.judge is not None:
        return _judge(msgspec.json.decode(options.judge.read_bytes()))
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
                _write(options.out, _record(at_s, load, points, load.calls - warm_calls))
                print(f"{at_s:6.0f} s  {load.done.total()} operations, {len(load.wrong)} wrong", flush=True)
                time.sleep(max(0.0, options.every_s - (time.monotonic() - began_s - at_s)))
        finally:
            load.stop()
        took_s = time.monotonic() - began_s
    record = _record(took_s, load, points, load.calls - warm_calls)
    _write(options.out, record)
    return _judge(record)


def _judge(record: dict[str, Any]) -> int:
    """Prints the verdict on a soak's record."""
    calls, wrong = record["calls_after_warm_up"], record["wrong"]
    length_s, operations = record["minutes"] * 60, record["operations"]
    starts = operations.get("cold", 0) + operations.get("deploy", 0)
    verdicts = verdict(record["points"], length_s=length_s, calls=calls, starts=starts)
    print(table(verdicts, calls=calls))
    print(f"{record['minutes']:g} minutes, {record['operations']}, of which wrong: {len(wrong)}")
    print("\n".join(wrong[:WRONG_SHOWN]))
    return 1 if wrong or not all(one.flat for one in verdicts) else 0


def verdict(
    points: Mapping[str, Sequence[Sequence[float]]], *, length_s: float, calls: int, starts: int
) -> list[Verdict]:
    """A verdict on each series; one that has no value at some moment was 0 there.

    `calls`: after the warm-up; `starts`: in the whole time.
    """
    hours = (length_s - _warmup_s(length_s)) / 3600
    starts_after = starts * hours * 3600 / length_s
    moments = sorted({point[0] for series in points.values() for point in series})
    found = []
    for name, known in sorted(points.items()):
        values = {point[0]: point[1] for point in known}
        series = Series(
            name=name,
            points=[(at_s, values.get(at_s, 0.0)) for at_s in moments],
            least=LEAST.get(name.rpartition(" ")[2], 0.0) + BOUNDED.get(name, 0.0),
            by_design=PER_CALL.get(name, 0.0) * calls
            + PER_START.get(name, 0.0) * starts_after
            + PER_HOUR.get(name, 0.0) * hours,
        )
        found.append(judge(series, warmup_s=_warmup_s(length_s)))
    return found


def _warmup_s(length_s: float) -> float:
    """Caches fill, allocators settle and the first compactions run: a third of a soak, 15 minutes at most."""
    return min(length_s / 3, 900.0)


def _record(
    took_s: float, load: Load, points: Mapping[str, Sequence[tuple[float, float]]], calls: int
) -> dict[str, Any]:
    return {
        "minutes": round(took_s / 60, 1),
        "operations": dict(load.done),
        "wrong": load.wrong,
        "calls_after_warm_up": calls,
        "points": {name: [(round(at_s), value) for at_s, value in series] for name, series in points.items()},
    }


def _write(path: Path | None, record: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(record) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
