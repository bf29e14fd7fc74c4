"""The timeline: phases overlap, join across machines, and read as a header."""

from __future__ import annotations

import time

import msgspec
import pytest

from fleetstart.runtime.contract.timeline import PHASES_OF_WORKER_MAX, Timeline, machine_origin_ns

MS = 1_000_000


def test_a_span_is_recorded_also_when_it_fails() -> None:
    timeline = Timeline()
    with pytest.raises(RuntimeError), timeline.span("load"):
        raise RuntimeError
    (phase,) = timeline.phases
    assert phase.name == "load"
    assert phase.started_ns <= phase.ended_ns <= time.monotonic_ns()


def test_joining_a_timeline_of_another_machine_shifts_it_onto_this_clock() -> None:
    here = Timeline(origin_unix_ns=1_000_000 * MS)
    there = Timeline(origin_unix_ns=1_400_000 * MS)
    there.add("fetch", 10 * MS, 20 * MS)
    here.join(there)
    assert here.phases[0].started_ns == 400_010 * MS
    assert here.total_ms("fetch") == 10


def test_two_processes_of_one_machine_are_not_shifted_by_their_guess_of_the_origin() -> None:
    here, there = Timeline(origin_unix_ns=5_000 * MS), Timeline(origin_unix_ns=5_000 * MS + 700)
    there.add("start", 3 * MS, 4 * MS)
    here.join(there)
    assert here.phases[0].started_ns == 3 * MS


def test_server_timing_sums_each_phase_in_order_of_appearance() -> None:
    timeline = Timeline()
    timeline.add("queue", 0, 2 * MS)
    timeline.add("fetch", 0, 5 * MS)
    timeline.add("queue", 7 * MS, 8 * MS)
    assert timeline.server_timing() == "queue;dur=3.00, fetch;dur=5.00"


def test_a_timeline_travels_as_json() -> None:
    timeline = Timeline()
    timeline.add("execute", 1, 2)
    assert msgspec.json.decode(msgspec.json.encode(timeline), type=Timeline) == timeline


def test_a_workers_own_phases_are_believed_within_the_time_that_it_had() -> None:
    own = Timeline()
    own.add("import", -(10**18), 150)
    own.add("load", 150, 10**18)
    own.add("device", 300, 400)
    own.phases += own.phases * 1000
    seen = own.within(100, 200)
    assert [(phase.name, phase.started_ns, phase.ended_ns) for phase in seen.phases[:2]] == [
        ("import", 100, 150),
        ("load", 150, 200),
    ]
    assert {phase.name for phase in seen.phases} == {"import", "load"}
    assert len(seen.phases) <= PHASES_OF_WORKER_MAX


def test_the_phases_of_a_worker_whose_clock_is_another_are_shifted_before_they_are_clipped() -> None:
    """A sandbox of gVisor counts from its own beginning."""
    own = Timeline(origin_unix_ns=machine_origin_ns() + 400_000 * MS)
    own.add("load", 10 * MS, 20 * MS)
    (phase,) = own.within(400_000 * MS, 400_040 * MS).phases
    assert phase.duration_ms == pytest.approx(10, abs=1)
    assert abs(phase.started_ns - 400_010 * MS) < 5 * MS
