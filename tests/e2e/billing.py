"""Soak of the ledger: calls go on while all parts are killed at random; then every row and sum must be right.

`python -m tests.e2e.billing --calls 10000` is the long one, `test_billing` a short one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import secrets
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec

from fleetstart.controller.billing.archive_format import SegmentHeader
from fleetstart.controller.billing.archive_store import LedgerArchive
from fleetstart.controller.schemas.functions import Invoice, LedgerLine, Usage
from fleetstart.controller.storage.folder_store import FolderStore
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.ledger import InvocationRow, PhaseRow, cost_nusd, dollars
from tests.e2e.systems import System, running
from tests.servers import NO_CERTIFICATES, wait_until

HANDLER = """
import time
from fleetstart.runtime import Scale, function

@function(memory="64MiB", concurrency=8, tags={"team": "soak"}, scale=Scale(min=1, max=2, keep_alive_s=5))
def soak():
    time.sleep(0.004)
    return "slept"
"""
SEGMENT_ROWS = 200
KINDS = ("controller", "redis", "node", "worker", "forkserver")
ANSWER_S = 60.0
CALLS_BETWEEN = 100
"""Calls that are answered between a kill and the one after the next: two parts may be away at a time. More kills than
these, and a machine that takes long to bring parts back never answers."""
SETTLED_S = 60.0


@dataclass(frozen=True, slots=True)
class Call:
    request: str
    cost: str
    """Fs-Cost of its answer."""


class Callers:
    """Clients that ask again, under the same id, until they are answered."""

    def __init__(self, system: System, *, calls: int, clients: int) -> None:
        self._system = system
        self._left = calls
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._client) for _ in range(clients)]
        self.calls: list[Call] = []
        self.failed: list[str] = []

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(ANSWER_S + 5)

    def abandon(self) -> None:
        with self._lock:
            self._left = 0
        self.join()

    @property
    def under_way(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def _client(self) -> None:
        with httpx.Client(trust_env=False, timeout=30, verify=NO_CERTIFICATES) as http:
            while self._next():
                self._call(http)

    def _next(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left >= 0

    def _call(self, http: httpx.Client) -> None:
        request = f"soak-{secrets.token_hex(8)}"
        ends, last = time.monotonic() + ANSWER_S, ""
        while time.monotonic() < ends:
            try:
                answer = http.post(f"{self._system.url}/fn/soak", json={}, headers={"x-request-id": request})
            except httpx.TransportError as error:
                last = repr(error)
            else:
                if answer.status_code == 200:
                    self.calls.append(Call(answer.headers["x-request-id"], answer.headers["fs-cost"]))
                    return
                last = answer.text
            time.sleep(0.05)
        self.failed.append(f"{request}: {last}")


def soak(
    system: System, *, calls: int, clients: int, pause_s: tuple[float, float], seed: int, kinds: Sequence[str] = KINDS
) -> Counter[str]:
    """Runs the soak; returns the kills of each part. Errors: AssertionError if the ledger is wrong afterwards."""
    system.deploy(HANDLER, name="soak")
    system.ok("soak")
    chance = random.Random(seed)
    killed: Counter[str] = Counter()
    callers = Callers(system, calls=calls, clients=clients)
    callers.start()
    answered = [-CALLS_BETWEEN, -CALLS_BETWEEN]
    try:
        while callers.under_way:
            time.sleep(chance.uniform(*pause_s))
            enough = answered[-2] + CALLS_BETWEEN
            wait_until(lambda: len(callers.calls) >= enough or not callers.under_way, ANSWER_S, what="calls")  # noqa: B023
            answered.append(len(callers.calls))
            kind = chance.choice(kinds)
            victims = system.of_kind(kind)
            if victims and callers.under_way:
                with contextlib.suppress(ProcessLookupError):
                    system.kill(chance.choice(victims))
                    killed[kind] += 1
            if kind == "supervisor":
                system.fs("up", "--port", system.url.rpartition(":")[2])
    finally:
        callers.abandon()
    assert callers.failed == []
    assert len(callers.calls) == calls
    check_books(system, callers.calls)
    return killed


def check_books(system: System, calls: list[Call]) -> None:
    asked = {call.request: call for call in calls}
    lines = wait_until(lambda: _settled(system, set(asked)), SETTLED_S, what="a settled ledger")
    names = Counter(line.row.id for line in lines)
    assert [name for name, count in names.items() if count != 1] == [], "each row once"
    assert [name for name in asked if name not in names] == [], "each call has its row"
    entries = [tuple(map(int, line.entry.split("-"))) for line in lines]
    assert entries == sorted(set(entries))
    for line in lines:
        row = line.row
        length_ms = row.billed_ms if isinstance(row, InvocationRow) else row.duration_ms
        assert row.cost_nusd == cost_nusd(length_ms, row.memory_bytes, row.rate_nusd_per_gib_s)
        assert row.tags == {"team": "soak"}
        if isinstance(row, InvocationRow) and row.id in asked:
            assert dollars(row.cost_nusd) == asked[row.id].cost, "the bill is what the answer said"
    _check_lives([line.row for line in lines if isinstance(line.row, PhaseRow)])
    _check_sums(system, lines)
    _check_segments(system, lines)


def _settled(system: System, asked: set[str]) -> list[LedgerLine]:
    """All rows of the ledger, once those of all calls are there and nothing is under way or put aside."""
    try:
        with system.redis() as client:
            late: Any = client.xlen(keys.LEDGER_LATE)
        if late or system.open_invocations():
            return []
        lines = ledger(system)
    except Exception:  # what was killed last comes back first
        return []
    return lines if asked <= {line.row.id for line in lines} else []


def ledger(system: System) -> list[LedgerLine]:
    answer = system.http.get("/api/v1/ledger").raise_for_status()
    return [msgspec.json.decode(line, type=LedgerLine) for line in answer.content.splitlines()]


def _check_lives(rows: list[PhaseRow]) -> None:
    """Numbers of each phase of each worker run from 1 without a gap, and its serving time is tiled by its rows.
    A daemon that is killed takes the end of the record with it, never a piece of its middle."""
    numbers: dict[str, list[int]] = defaultdict(list)
    serving: dict[str, list[PhaseRow]] = defaultdict(list)
    for row in rows:
        life, _, number = row.id.rpartition("/")
        numbers[life].append(int(number))
        if row.phase in ("execute", "idle"):
            serving[row.worker].append(row)
    for life, found in numbers.items():
        assert sorted(found) == list(range(1, len(found) + 1)), life
    for worker, life_rows in serving.items():
        ordered = sorted(life_rows, key=lambda row: row.started_unix_ms)
        for one, following in pairwise(ordered):
            assert one.started_unix_ms + one.duration_ms == following.started_unix_ms, worker


def _check_sums(system: System, lines: list[LedgerLine]) -> None:
    """Checks the sums as of the moment in which `lines` were read: rows booked since are left out everywhere."""
    until = int(lines[-1].entry.partition("-")[0]) + 1
    lines = [line for line in ledger(system) if int(line.entry.partition("-")[0]) < until]
    total = sum(line.row.cost_nusd for line in lines)
    for by in ("function,version,phase,key,tag,day", "function", "day", "tag:team"):
        query: dict[str, str | int] = {"by": by, "until_unix_ms": until}
        usage = msgspec.json.decode(system.http.get("/api/v1/usage", params=query).content, type=Usage)
        assert (usage.total_nusd, sum(line.rows for line in usage.lines)) == (total, len(lines)), by
    months = sorted({datetime.fromtimestamp(int(line.entry[:10]), UTC).strftime("%Y-%m") for line in lines})
    invoices = [
        msgspec.json.decode(system.http.get(f"/api/v1/invoices/{month}").content, type=Invoice) for month in months
    ]
    # Idle time is booked meanwhile: an invoice is made of the rows that were there when it was made, the first ones.
    rows = ledger(system)[: sum(invoice.rows for invoice in invoices)]
    assert len(rows) >= len(lines)
    assert sum(invoice.total_nusd for invoice in invoices) == sum(line.row.cost_nusd for line in rows)


def _check_segments(system: System, lines: list[LedgerLine]) -> None:
    """Checks that segments name each other, count their rows on, and hold the rows that were read, in their order."""

    async def read() -> list[str]:
        archive = LedgerArchive(FolderStore(system.home / "store"))
        after: SegmentHeader | None = None
        found: list[str] = []
        sequence = 1
        while (segment := await archive.find(sequence, after)) is not None:
            header: SegmentHeader = segment[0]
            assert header.first_row == len(found) + 1
            found += [entry.row.id for entry in segment[1]]
            after, sequence = header, sequence + 1
        return found

    def compacted() -> list[str]:
        names = asyncio.run(read())
        return names if len(names) >= SEGMENT_ROWS else []

    # The scheduler that was killed last looks for rows to compact again when it has its lease again.
    names = wait_until(compacted, SETTLED_S, what=f"a segment of {SEGMENT_ROWS} rows")
    known = [str(line.row.id) for line in lines]
    assert names[: len(known)] == known[: len(names)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill everything at random under calls, then check the books.")
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--out", type=Path, help="Write what was found as JSON.")
    options = parser.parse_args()
    began_s = time.monotonic()
    with running(env={"FS_PROFILES": "python", "FS_SEGMENT_ROWS": str(SEGMENT_ROWS)}) as system:
        killed = soak(
            system, calls=options.calls, clients=options.clients, pause_s=(1.0, 4.0), seed=options.seed,
            kinds=(*KINDS, "supervisor"),
        )  # fmt: skip
        lines = ledger(system)
        month = datetime.now(UTC).strftime("%Y-%m")
        invoice = msgspec.json.decode(system.http.get(f"/api/v1/invoices/{month}").content, type=Invoice)
        found = {
            "calls": options.calls,
            "seed": options.seed,
            "seconds": round(time.monotonic() - began_s, 1),
            "killed": dict(killed),
            "rows": len(lines),
            "segments": invoice.segments,
            "total_nusd": invoice.total_nusd,
        }
    print(msgspec.json.format(msgspec.json.encode(found)).decode())
    if options.out is not None:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")


if __name__ == "__main__":
    main()
