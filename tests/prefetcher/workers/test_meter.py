"""Ledger rows tile a worker's lifetime: no millisecond lost, none twice."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.prefetcher.workers.meter import LedgerBuffer, WorkerMeter
from fleetstart.runtime.contract.billing.ledger import PhaseRow, cost_nusd
from fleetstart.runtime.contract.billing.prices import FIRST
from fleetstart.runtime.contract.ids import FunctionName, NodeId, Version, WorkerId

ORIGIN_NS = 1_700_000_000_000_000_000


def meter() -> WorkerMeter:
    template = PhaseRow(
        id="",
        worker=WorkerId("w-1"),
        node=NodeId("n"),
        function=FunctionName("f"),
        version=Version(1),
        phase="start",
        started_unix_ms=0,
        duration_ms=0,
        memory_bytes=1,
    )
    return WorkerMeter(template, ORIGIN_NS)


@given(st.lists(st.tuples(st.integers(0, 20_000_000_000), st.floats(0, 1)), min_size=1, max_size=20))
def test_execute_and_idle_add_up_to_the_time_since_ready(steps: list[tuple[int, float]]) -> None:
    subject = meter()
    now_ns, busy_ns = 5_123_456_789, 0
    ready_ns = now_ns
    subject.ready(now_ns)
    rows = []
    for step_ns, share in steps:
        now_ns += step_ns
        busy_ns += int(step_ns * share)
        subject.busy(busy_ns, now_ns)
        rows += subject.flush(now_ns)

    assert sum(row.duration_ms for row in rows) == (now_ns - ready_ns) // 1_000_000
    executed = sum(row.duration_ms for row in rows if row.phase == "execute")
    assert busy_ns // 1_000_000 - 1 <= executed <= busy_ns // 1_000_000
    assert len({row.id for row in rows}) == len(rows)
    ends = [row.started_unix_ms + row.duration_ms for row in rows]
    assert [row.started_unix_ms for row in rows[1:]] == ends[:-1]
    assert all(row.cost_nusd == 0 and row.duration_ms > 0 for row in rows)


def test_a_standby_is_free_has_the_memory_that_is_left_and_tiles_with_the_rest() -> None:
    subject = meter()
    subject.ready(1_000_000_000)
    subject.set_rate(FIRST, 1_000_000_000, kept=True)
    rows = [
        *subject.stand_by(77, 2_000_000_000),
        *subject.flush(4_000_000_000),
        *subject.wake(5_000_000_000),
        *subject.woken(5_500_000_000),
        *subject.flush(6_000_000_000),
    ]
    assert [(row.phase, row.duration_ms, row.memory_bytes) for row in rows] == [
        ("idle", 1000, 1), ("standby", 2000, 77), ("standby", 1000, 77), ("load", 500, 1), ("idle", 500, 1),
    ]  # fmt: skip
    assert all(not row.cost_nusd for row in rows if row.phase != "idle")
    assert len({row.id for row in rows}) == len(rows)
    ends = [row.started_unix_ms + row.duration_ms for row in rows]
    assert [row.started_unix_ms for row in rows[1:]] == ends[:-1]


@given(
    st.lists(
        st.tuples(st.integers(0, 5_000_000_000), st.floats(0, 1), st.booleans(), st.integers(0, 3)),
        min_size=1,
        max_size=20,
    )
)
def test_idle_time_is_billed_while_it_is_kept_and_only_then(steps: list[tuple[int, float, bool, int]]) -> None:
    """Whenever keeping or prices change, rows still tile the time, and each has the rate of its own time."""
    subject = meter()
    now_ns = ready_ns = 5_000_000_000
    busy_ns, kept_ms = 0, 0
    subject.ready(now_ns)
    rows, before = [], (False, FIRST)
    for step_ns, share, kept, sheet in steps:
        now_ns += step_ns
        busy_ns += int(step_ns * share)
        subject.busy(busy_ns, now_ns)
        after = (kept, msgspec.structs.replace(FIRST, version=sheet + 1, idle_nusd_per_gib_s=1000 * sheet))
        new = subject.set_rate(after[1], now_ns, kept=kept) + subject.flush(now_ns)
        for row in new:
            expected = before[1].idle_nusd_per_gib_s if before[0] and row.phase == "idle" else 0
            assert (row.rate_nusd_per_gib_s, row.price) == (expected, before[1].version)
            assert row.cost_nusd == cost_nusd(row.duration_ms, row.memory_bytes, expected)
            kept_ms += row.duration_ms if expected else 0
        rows += new
        before = after
    assert sum(row.duration_ms for row in rows) == (now_ns - ready_ns) // 1_000_000
    assert kept_ms <= sum(row.duration_ms for row in rows if row.phase == "idle")
    assert len({row.id for row in rows}) == len(rows)


@given(st.lists(st.tuples(st.integers(0, 5_000_000_000), st.integers(-(2**62), 2**62)), min_size=1, max_size=20))
def test_a_worker_cannot_have_worked_longer_than_the_clock_went_since_its_last_word(
    steps: list[tuple[int, int]],
) -> None:
    subject = meter()
    now_ns = ready_ns = 5_000_000_000
    subject.ready(now_ns)
    for step_ns, claimed_ns in steps:
        now_ns += step_ns
        subject.busy(claimed_ns, now_ns)
    later_ns = now_ns + 60_000_000_000
    rows = subject.set_rate(FIRST, now_ns, kept=True) + subject.flush(later_ns)
    executed = sum(row.duration_ms for row in rows if row.phase == "execute")
    assert 0 <= executed <= (now_ns - ready_ns) // 1_000_000
    idle = sum(row.duration_ms for row in rows if row.phase == "idle" and row.rate_nusd_per_gib_s)
    assert idle >= 60_000 - 1, "what it claimed ahead pays for no time to come"


def test_what_comes_before_ready_is_waived_also_of_a_kept_worker() -> None:
    subject = meter()
    assert subject.set_rate(FIRST, 0, kept=True) == []
    assert subject.phase("load", 0, 10**9).rate_nusd_per_gib_s == 0


def test_a_worker_that_never_got_ready_has_no_serving_time() -> None:
    assert meter().flush(10**12) == []


def test_phases_are_numbered_and_placed_in_time() -> None:
    subject = meter()

    first, second = subject.phase("start", 0, 1_999_999), subject.phase("start", 2_000_000, 5_000_000)

    assert (first.id, first.started_unix_ms, first.duration_ms) == ("w-1/start/1", ORIGIN_NS // 1_000_000, 1)
    assert (second.id, second.duration_ms) == ("w-1/start/2", 3)


def test_rows_stay_until_they_are_written() -> None:
    rows, subject = LedgerBuffer(), meter()
    rows.add(*(subject.phase("idle", 0, 1) for _ in range(5)))

    batch = rows.peek(3)
    assert rows.peek(3) == batch
    rows.drop(batch)

    assert [row.id for row in rows.peek()] == ["w-1/idle/4", "w-1/idle/5"]


def test_the_idle_time_of_a_kept_worker_is_billed_for_its_devices_too() -> None:
    template = msgspec.structs.replace(
        meter()._template, memory_bytes=1 << 30, device_type="H100", device_bytes=3 << 30
    )
    subject = WorkerMeter(template, ORIGIN_NS)
    subject.ready(1_000_000)
    sheet = msgspec.structs.replace(FIRST, version=2, device_nusd_per_gib_s={"H100": 100, "T4": 7})
    assert all(row.cost_nusd == 0 for row in subject.set_rate(sheet, 2_000_000_000, kept=True))
    (row,) = subject.flush(4_000_000_000)
    assert (row.device_type, row.device_bytes, row.device_rate_nusd_per_gib_s) == ("H100", 3 << 30, 100)
    assert row.duration_ms == 2000
    assert row.cost_nusd == 2 * (FIRST.idle_nusd_per_gib_s + 3 * 100)
    (later,) = subject.set_rate(sheet, 5_000_000_000, kept=False)
    assert later.cost_nusd > 0
    (waived,) = subject.flush(6_000_000_000)
    assert (waived.cost_nusd, waived.device_rate_nusd_per_gib_s, waived.device_bytes) == (0, 0, 3 << 30)
