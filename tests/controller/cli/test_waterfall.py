from __future__ import annotations

import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.cli.waterfall import bar, compare_timelines, waterfall
from fleetstart.runtime.contract.timeline import Phase

MS = 1_000_000


def test_bars_share_one_axis_and_overlap_is_seen() -> None:
    phases = [
        Phase("execute", 70 * MS, 100 * MS),
        Phase("queue", 0, 70 * MS),
        Phase("fetch", 10 * MS, 60 * MS),
        Phase("import", 10 * MS, 30 * MS),
    ]
    lines = waterfall(phases, width=80).splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["queue", "fetch", "import", "execute"]
    begins = {line.split()[0]: line.index("█") for line in lines[:-1]}
    assert begins["queue"] < begins["fetch"] == begins["import"] < begins["execute"]
    assert "50.0 ms  weights from the store" in lines[1]
    assert lines[-1].endswith("100.0 ms")


def test_a_phase_in_several_pieces_is_one_line() -> None:
    phases = [Phase("start", 0, 20 * MS), Phase("fetch", 20 * MS, 80 * MS), Phase("start", 80 * MS, 100 * MS)]
    start, fetch, _ = waterfall(phases, width=80).splitlines()
    assert "40.0 ms  starting a process" in start
    assert start.index("█") < fetch.index("█") < start.rindex("█")


def test_two_timelines_share_one_axis_from_their_beginnings() -> None:
    before = [Phase("start", 1000 * MS, 1020 * MS), Phase("load", 1020 * MS, 1100 * MS)]
    now = [Phase("start", 7 * MS, 27 * MS), Phase("fetch", 27 * MS, 37 * MS), Phase("load", 27 * MS, 67 * MS)]
    lines = compare_timelines(before, now, width=100).splitlines()
    said = [re.sub("[▏▎▍▌▋▊▉█]", "", line).split() for line in lines[:-1]]
    assert said == [
        ["start", "now", "20.0", "ms", "+0.0"],
        ["before", "20.0", "ms"],
        ["fetch", "now", "10.0", "ms", "+10.0"],
        ["before", "0.0", "ms"],
        ["load", "now", "40.0", "ms", "-40.0"],
        ["before", "80.0", "ms"],
    ]
    assert lines[0].index("█") == lines[1].index("█")
    assert abs(lines[5].count("█") - 2 * lines[4].count("█")) <= 1
    assert lines[-1].endswith("100.0 ms")


@given(st.lists(st.tuples(st.sampled_from(["start", "load"]), st.integers(0, 10**12), st.integers(0, 10**12))))
def test_any_two_timelines_can_stand_beside_each_other(given: list[tuple[Any, int, int]]) -> None:
    phases = [Phase(name, min(one, two), max(one, two)) for name, one, two in given]
    for now in (phases, phases[:1], [Phase("fetch", 5, 5)]):
        assert (
            len({line.index("  now  ") for line in compare_timelines(phases, now).splitlines() if "  now  " in line})
            <= 1
        )


def test_nothing_recorded_is_said() -> None:
    assert waterfall([]) == "no phases were recorded"


@given(
    st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 10**12)), min_size=1, max_size=9), st.integers(20, 200)
)
def test_every_phase_shows_and_no_line_is_too_long(spans: list[tuple[int, int]], width: int) -> None:
    phases = [Phase(("load", "start", "fetch")[at % 3], min(span), max(span)) for at, span in enumerate(spans)]
    lines = waterfall(phases, width=width).splitlines()
    assert len(lines) == min(3, len(phases)) + 1
    assert all(any(mark in line for mark in "▏▎▍▌▋▊▉█") for line in lines[:-1])
    assert all(len(line) <= max(width, 70) for line in lines[:-1])


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 200))
def test_a_bar_has_the_width_of_its_axis(one: float, other: float, columns: int) -> None:
    drawn = bar(min(one, other), max(one, other), columns)
    assert len(drawn) == columns
    assert drawn.strip()
