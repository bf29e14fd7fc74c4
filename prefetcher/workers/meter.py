"""A worker's lifetime as ledger rows: every interval once, by phase, in whole milliseconds.

`start` is from the order until the process has its assignment, `load` from there until it is ready; then `execute`
and `idle` alternate in rows of up to `FLUSH_S`. A worker in standby has rows of that name, with the memory that is left
of it and no devices, and `load` again while it is woken. An attempt that never got ready ends in `failed`. `fetch`
overlaps with start and load. Only the idle time of workers kept because of `min` is billed here; calls are billed by
the gateway. Rows are cut so that rounding never loses or doubles a millisecond.
"""

from __future__ import annotations

from collections import Counter, deque

import msgspec

from fleetstart.runtime.contract.billing.ledger import PhaseRow, WorkerPhase, cost_nusd
from fleetstart.runtime.contract.billing.prices import FIRST, PriceSheet

FLUSH_S = 10.0
"""Interval between flushes: a daemon that is killed loses at most this much."""
LATE_NS = 2_000_000_000
"""How late a worker's word may come, on a busy node, and still count for the time that it was sent in."""
MAX_BUFFERED_ROWS = 100_000
"""Rows kept while Redis is unavailable: a day of a few busy workers."""


class WorkerMeter:
    """Meter of one worker. Takes monotonic stamps; `origin_unix_ns` is the unix time of their zero."""

    def __init__(self, template: PhaseRow, origin_unix_ns: int) -> None:
        """`template` is a row with all that the worker's rows have in common."""
        self._template = template
        self._origin_unix_ns = origin_unix_ns
        self._kept = False
        self._sheet = FIRST
        self._numbers: Counter[WorkerPhase] = Counter()
        self._ready_ns = 0
        self._busy_ns = 0
        self._busy_told_ns = 0
        """Time from which its next word about busy time may count, by this clock."""
        self._written_ms = {"execute": 0, "idle": 0}
        self._flushed_ms = 0
        self._unused: WorkerPhase = "idle"
        """Name of the time in which no call runs."""
        self._left_bytes = 0

    def phase(self, name: WorkerPhase, started_ns: int, ended_ns: int) -> PhaseRow:
        return self._row(name, started_ns // 1_000_000, ended_ns // 1_000_000 - started_ns // 1_000_000)

    def ready(self, now_ns: int) -> None:
        self._ready_ns = self._busy_told_ns = now_ns

    @property
    def is_running(self) -> bool:
        """True once the worker has become ready."""
        return self._ready_ns > 0

    def busy(self, busy_ns: int, now_ns: int) -> None:
        """Records the total busy time since ready, as the worker counts it; a message out of order changes nothing.

        Its word is believed up to the time that has passed here since its last: nobody works ahead of the clock.
        """
        grown_ns = max(0, min(busy_ns - self._busy_ns, now_ns - self._busy_told_ns))
        self._busy_ns += grown_ns
        self._busy_told_ns = max(self._busy_told_ns + grown_ns, now_ns - LATE_NS)

    def set_rate(self, sheet: PriceSheet, now_ns: int, *, kept: bool) -> list[PhaseRow]:
        """Sets the price of idle time from now on, billed only if the worker is `kept` because of `min`. Returns the
        rows of the time before.

        Called a second or so after either has changed: what is billed too late is waived.
        """
        if (kept, sheet) == (self._kept, self._sheet):
            return []
        rows = self.flush(now_ns)
        self._kept, self._sheet = kept, sheet
        return rows

    def stand_by(self, left_bytes: int, now_ns: int) -> list[PhaseRow]:
        """Begins a standby, in which so much memory is left of the worker. Returns the rows of the time before."""
        rows = self.flush(now_ns)
        self._unused, self._left_bytes = "standby", left_bytes
        return rows

    def wake(self, now_ns: int) -> list[PhaseRow]:
        """Ends a standby: the worker loads. Returns the rows of the time before."""
        rows = self.flush(now_ns)
        self._unused = "load"
        return rows

    def woken(self, now_ns: int) -> list[PhaseRow]:
        """The worker serves again. Returns the rows of the time before."""
        rows = self.flush(now_ns)
        self._unused = "idle"
        return rows

    def flush(self, now_ns: int) -> list[PhaseRow]:
        """Rows for the time since the last flush: busy first, then idle; they add up to it exactly."""
        if not self._ready_ns:
            return []
        elapsed_ms = (now_ns - self._ready_ns) // 1_000_000
        interval_ms = elapsed_ms - self._flushed_ms
        execute_ms = min(self._busy_ns // 1_000_000 - self._written_ms["execute"], interval_ms)
        begin_ms = self._ready_ns // 1_000_000 + self._flushed_ms
        self._flushed_ms = elapsed_ms
        self._written_ms["execute"] += execute_ms
        rows: list[PhaseRow] = []
        if execute_ms:
            rows.append(self._row("execute", begin_ms, execute_ms))
        if interval_ms - execute_ms:
            rows.append(self._row(self._unused, begin_ms + execute_ms, interval_ms - execute_ms))
        return rows

    def _row(self, name: WorkerPhase, started_ms: int, duration_ms: int) -> PhaseRow:
        self._numbers[name] += 1
        template, kept = self._template, self._kept and name == "idle"
        if name == "standby":
            template = msgspec.structs.replace(template, memory_bytes=self._left_bytes, device_bytes=0)
        rate = self._sheet.idle_nusd_per_gib_s if kept else 0
        device_rate = self._sheet.device_rate(template.device_type) if kept else 0
        return msgspec.structs.replace(
            template,
            id=f"{template.worker}/{name}/{self._numbers[name]}",
            phase=name,
            started_unix_ms=self._origin_unix_ns // 1_000_000 + started_ms,
            duration_ms=duration_ms,
            rate_nusd_per_gib_s=rate,
            device_rate_nusd_per_gib_s=device_rate,
            cost_nusd=cost_nusd(duration_ms, template.memory_bytes, rate)
            + cost_nusd(duration_ms, template.device_bytes, device_rate),
            price=self._sheet.version,
        )


class LedgerBuffer:
    """Rows waiting to be written to the ledger. Writing a row twice is harmless, so a failed batch is kept."""

    def __init__(self) -> None:
        self._waiting: deque[PhaseRow] = deque(maxlen=MAX_BUFFERED_ROWS)
        self._waived_ms: Counter[str] = Counter()
        self.kept_nusd = 0
        """Cost of the idle time of kept workers, since the daemon started."""

    def add(self, *rows: PhaseRow) -> None:
        self._waiting.extend(rows)
        for row in rows:
            self.kept_nusd += row.cost_nusd
            if not row.cost_nusd and not row.rate_nusd_per_gib_s and row.phase != "execute":  # that is billed, by call
                self._waived_ms[row.phase] += row.duration_ms

    @property
    def waived_ms(self) -> dict[str, int]:
        """Unbilled time by phase, since the daemon started."""
        return dict(self._waived_ms)

    def peek(self, most: int = 500) -> list[PhaseRow]:
        return [self._waiting[index] for index in range(min(most, len(self._waiting)))]

    def drop(self, batch: list[PhaseRow]) -> None:
        """Removes a written batch. A full buffer may have dropped some of its rows already."""
        written = {row.id for row in batch}
        while self._waiting and self._waiting[0].id in written:
            self._waiting.popleft()
