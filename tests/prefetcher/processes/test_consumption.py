"""What a worker used, in its rows: nothing twice, nothing lost, and nothing where nothing was measured."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.prefetcher.processes.consumption import Consumption, ConsumptionMeter
from fleetstart.runtime.contract.billing.ledger import PhaseRow, WorkerPhase
from fleetstart.runtime.contract.ids import FunctionName, NodeId, Version, WorkerId

NAMES = ("cpu_ms", "memory_peak_bytes", "received_bytes", "sent_bytes", "device_peak_bytes")


def row(phase: WorkerPhase) -> PhaseRow:
    return PhaseRow(
        id=f"w/{phase}/1",
        worker=WorkerId("w"),
        node=NodeId("n"),
        function=FunctionName("f"),
        version=Version(1),
        phase=phase,
        started_unix_ms=0,
        duration_ms=5,
        memory_bytes=1,
    )


def columns(found: PhaseRow) -> tuple[int | None, ...]:
    return tuple(getattr(found, name) for name in NAMES)


@given(st.lists(st.tuples(st.integers(0, 3_000_000), st.integers(0, 1000), st.booleans()), max_size=30))
def test_rows_add_up_to_what_was_used_to_the_last_whole_millisecond(steps: list[tuple[int, int, bool]]) -> None:
    subject, cpu_ns, sent_bytes, rows = ConsumptionMeter(), 0, 0, []
    for used_ns, sent, busy in steps:
        cpu_ns, sent_bytes = cpu_ns + used_ns, sent_bytes + sent
        written = [row("execute"), row("idle")] if busy else [row("idle")]
        rows += subject.onto(written, Consumption(cpu_ns=cpu_ns, sent_bytes=sent_bytes, received_bytes=0))
    assert sum(one.cpu_ms or 0 for one in rows) == cpu_ns // 1_000_000
    assert sum(one.sent_bytes or 0 for one in rows) == sent_bytes


def test_the_busy_time_has_what_grew_and_all_have_the_most() -> None:
    subject = ConsumptionMeter()
    subject.note_device(70)
    subject.note_device(60)
    used = Consumption(cpu_ns=9_000_000, memory_peak_bytes=50, received_bytes=8, sent_bytes=7)
    idle, busy = subject.onto([row("idle"), row("execute")], used)
    assert columns(busy) == (9, 50, 8, 7, 70)
    assert columns(idle) == (0, 50, 0, 0, 70)


def test_without_control_groups_lists_and_gpus_rows_stay_as_they_are() -> None:
    before = [row("load"), row("idle")]
    assert ConsumptionMeter().onto(before, Consumption()) == before
    assert ConsumptionMeter().onto([], Consumption(cpu_ns=5)) == []


def test_a_process_that_replaced_another_begins_anew() -> None:
    subject = ConsumptionMeter()
    subject.onto([row("load")], Consumption(cpu_ns=9_000_000))
    assert subject.onto([row("load")], Consumption(cpu_ns=2_000_000))[0].cpu_ms == 0
    assert subject.onto([row("load")], Consumption(cpu_ns=5_000_000))[0].cpu_ms == 3


def test_an_earlier_release_reads_rows_with_columns_that_it_does_not_know() -> None:
    """As this one reads rows of a later one."""
    fields = {**msgspec.to_builtins(row("idle")), "invented_later": 1}
    assert msgspec.json.decode(msgspec.json.encode(fields), type=PhaseRow) == row("idle")
