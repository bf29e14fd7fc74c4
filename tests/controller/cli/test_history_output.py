"""The text of `fs history`: sparklines and events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.cli.commands.history import BLOCKS, events_table, shown, sparkline
from fleetstart.controller.history.call_counts import CallCounts
from fleetstart.controller.history.series import history_of, span_of
from fleetstart.controller.schemas.history import SystemEvent

NOW_MS = 1_800_000_000_000


@given(st.lists(st.none() | st.floats(0, 1e12)))
def test_a_sparkline_has_a_column_for_each_value_and_is_full_at_the_highest(values: list[float | None]) -> None:
    line = sparkline(values)
    assert len(line) == len(values)
    assert set(line) <= {" ", *BLOCKS}
    assert [column == " " for column in line] == [not value for value in values]
    assert (BLOCKS[-1] in line) == any(values)


def test_a_history_is_a_table_of_sparklines_with_totals() -> None:
    span = span_of("1h", "", NOW_MS)
    counts = CallCounts(calls=1500, failed=3, cold=2, cost_nusd=12_345, total_ms={3: 1499, 30: 1}, wait_ms={30: 2})
    lines = shown(history_of("hello", span, [(span.since_unix_ms + 60_000, counts)])).splitlines()
    assert lines[0].startswith("hello")
    assert "2027-01-15 07:01 to 2027-01-15 08:01, a column is 1 min" in lines[0]
    assert [line.split()[0] for line in lines[1:4]] == ["calls", "failed", "refused"]
    assert lines[1].index("█") == lines[2].index("█")
    assert lines[1].endswith("1,500")
    assert lines[2].endswith("3 (0.2%)")
    assert lines[3].endswith(" 0")
    assert "3 ms" in lines[4]
    assert lines[-1].endswith("$0.000012345")


def test_events_are_one_line_each_the_oldest_first() -> None:
    events = [
        SystemEvent(unix_ms=NOW_MS, kind="failure", function="f", version=2, text="a start failed: one\ntwo"),
        SystemEvent(unix_ms=NOW_MS - 60_000, kind="node", text="node-1 is drained"),
    ]
    _, first, second = events_table(events).splitlines()
    assert first.split() == ["2027-01-15", "07:59", "node", "node-1", "is", "drained"]
    assert second.endswith("failure  f@2       a start failed: one two")
