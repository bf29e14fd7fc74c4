"""Sums: any grouping adds up to the same, and the invoice to the usage of its month."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.billing.archive_format import EntryId, LedgerEntry
from fleetstart.controller.billing.group_sums import day_name, group_of, sum_rows
from fleetstart.controller.billing.usage import (
    DIMENSIONS,
    InvoiceSums,
    UsageSums,
    is_waived,
    month_span,
    parse_by,
)
from fleetstart.runtime.contract.billing.ledger import LedgerRow
from fleetstart.runtime.contract.errors import InvalidInput
from fleetstart.runtime.contract.ids import FunctionName, InvocationId
from tests.controller.billing.rows import call, phase

tags = st.dictionaries(st.sampled_from(["team", "env"]), st.sampled_from(["a", "b"]), max_size=2)
rows = st.one_of(
    st.builds(
        call,
        st.uuids().map(str),
        cost=st.integers(0, 10**12),
        function=st.sampled_from(["f", "g"]),
        version=st.integers(1, 3),
        tags=tags,
    ),
    st.builds(
        phase,
        st.uuids().map(str),
        cost=st.integers(0, 10),
        of=st.sampled_from(["start", "fetch", "load", "execute", "idle", "failed"]),
        tags=tags,
    ),
)
DAY_MS = 86_400_000
ledgers = st.lists(st.tuples(rows, st.integers(0, 40 * DAY_MS)), max_size=30).map(
    lambda pairs: [entry(row, 20_000 * DAY_MS + at, i) for i, (row, at) in enumerate(pairs)]
)


def entry(row: LedgerRow, unix_ms: int, number: int = 0) -> LedgerEntry:
    return LedgerEntry(EntryId(unix_ms, number), msgspec.json.encode(row), row)


def day_of(entry: LedgerEntry) -> str:
    return day_name(group_of(entry).day)


@pytest.mark.slow
@given(ledgers, st.lists(st.sampled_from([*DIMENSIONS, "tag:team"]), unique=True, min_size=1))
def test_every_grouping_adds_up_to_the_same(ledger: list[LedgerEntry], names: list[str]) -> None:
    by = tuple(name for i, name in enumerate(names) if not (name.startswith("tag") and "tag" in "".join(names[:i])))
    sums = UsageSums(by=by)
    sums.add(sum_rows(ledger).items())
    usage = sums.result(0, 1)
    assert usage.total_nusd == sum(line.cost_nusd for line in usage.lines) == sum(e.row.cost_nusd for e in ledger)
    assert sum(line.rows for line in usage.lines) == len(ledger)
    groups = [(x.function, x.version, x.kind, x.key, x.tag, x.day) for x in usage.lines]
    assert len(set(groups)) == len(groups)


@given(ledgers)
def test_the_invoices_of_the_months_add_up_to_the_ledger(ledger: list[LedgerEntry]) -> None:
    total = count = 0
    for month in sorted({day_of(e)[:7] for e in ledger}):
        since, until = month_span(month)
        sums, usage = InvoiceSums(), UsageSums()
        part = [e for e in ledger if since <= e.id.unix_ms < until]
        assert {day_of(e)[:7] for e in part} == {month}
        sums.add(sum_rows(part).items())
        usage.add(sum_rows(part).items())
        invoice = sums.result(month, complete=True, segments=0, checksum="")
        assert invoice.total_nusd == usage.result(since, until).total_nusd
        total, count = total + invoice.total_nusd, count + invoice.rows
    assert (total, count) == (sum(e.row.cost_nusd for e in ledger), len(ledger))


def test_what_is_waived_is_shown_and_what_calls_pay_for_is_not_waived() -> None:
    assert is_waived(group_of(entry(phase("w/start/1", of="start"), 0)))
    assert is_waived(group_of(entry(phase("w/failed/1", of="failed"), 0)))
    assert is_waived(group_of(entry(phase("w/idle/1", of="idle"), 0)))
    assert not is_waived(group_of(entry(phase("w/idle/2", of="idle", cost=3), 0)))
    assert not is_waived(group_of(entry(phase("w/execute/1", of="execute"), 0)))
    sums = UsageSums(by=("function",))
    ledger = [entry(phase("a", of="fetch"), 0), entry(phase("b", of="execute"), 1), entry(call("c", cost=7), 2)]
    sums.add(sum_rows(ledger).items())
    [line] = sums.result(0, 9).lines
    assert (line.duration_ms, line.waived_ms, line.cost_nusd) == (5 + 5 + 7, 5, 7)


def test_what_workers_used_is_summed_or_the_most_and_what_no_row_has_is_none() -> None:
    """A row of an earlier release has none of it."""
    raw = msgspec.json.encode(phase("w/idle/0"))
    fields = msgspec.json.decode(raw)
    for name in ("cpu_ms", "memory_peak_bytes", "received_bytes", "sent_bytes", "device_peak_bytes"):
        del fields[name]
    old = msgspec.json.decode(msgspec.json.encode(fields), type=LedgerRow)
    measured = [
        msgspec.structs.replace(phase("w/execute/1", of="execute"), cpu_ms=30, memory_peak_bytes=700),
        msgspec.structs.replace(phase("w/idle/1"), cpu_ms=0, memory_peak_bytes=900, sent_bytes=5),
    ]
    sums = UsageSums(by=("function",))
    sums.add(sum_rows([entry(row, number) for number, row in enumerate([old, *measured, call("c", cost=7)])]).items())
    [line] = sums.result(0, 9).lines
    assert (line.cpu_ms, line.memory_peak_bytes, line.sent_bytes) == (30, 900, 5)
    assert (line.received_bytes, line.device_peak_bytes) == (None, None)
    assert line.cost_nusd == 7


def test_by_one_tag_and_by_all() -> None:
    ledger = [
        entry(call("a", cost=1, tags={"team": "ml", "env": "prod"}), 0),
        entry(call("b", cost=2, tags={"team": "ml"}), 1),
        entry(call("c", cost=4), 2),
    ]
    one, every = UsageSums(by=("tag:team",)), UsageSums(by=("tag",))
    one.add(sum_rows(ledger).items())
    every.add(sum_rows(ledger).items())
    assert [(line.tag, line.cost_nusd) for line in one.result(0, 9).lines] == [("", 4), ("ml", 3)]
    assert [line.tag for line in every.result(0, 9).lines] == ["", "env=prod,team=ml", "team=ml"]


def test_only_one_function() -> None:
    sums = InvoiceSums(function=FunctionName("g"))
    sums.add(sum_rows([entry(call("a", cost=1), 0), entry(call("b", cost=2, function="g"), 1)]).items())
    assert sums.result("2026-11", complete=False, segments=0, checksum="").total_nusd == 2


@pytest.mark.parametrize(
    ("text", "by"),
    [("", ("function", "version", "phase")), ("day", ("day",)), (" day, tag:team,day ", ("day", "tag:team"))],
)
def test_what_usage_can_be_shown_by(text: str, by: tuple[str, ...]) -> None:
    assert parse_by(text) == by


@pytest.mark.parametrize("text", ["functoin", "tag:", "tag,tag:x", "day;version", "x" * 9999])
def test_what_it_cannot_be_shown_by(text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_by(text)
    assert len(caught.value.message) < 120
    if text == "functoin":
        assert caught.value.hint == "did you mean function?"


@pytest.mark.parametrize(
    "text", ["2026", "2026-13", "2026-00", "26-11", "2026-11-01", "", "9999-12", "0000-01", "١٢٣٤-11"]
)
def test_what_is_no_month(text: str) -> None:
    with pytest.raises(InvalidInput):
        month_span(text)


def test_months_touch() -> None:
    assert month_span("2026-12")[1] == month_span("2027-01")[0]
    assert month_span("2024-02")[1] - month_span("2024-02")[0] == 29 * DAY_MS


def test_device_memory_is_summed_beside_host_memory_and_invoiced_by_type_and_rate() -> None:
    replace = msgspec.structs.replace
    on_h100 = replace(call("a", cost=10), billed_ms=2000, device_type="H100", device_bytes=24 << 30,
                      device_rate_nusd_per_gib_s=7)  # fmt: skip
    on_t4 = replace(on_h100, id=InvocationId("b"), device_type="T4", device_bytes=1 << 29, device_rate_nusd_per_gib_s=1)
    ledger = [entry(row, 20_000 * DAY_MS, i) for i, row in enumerate((on_h100, on_t4, call("c", cost=5)))]
    for by in (("function",), ("day", "phase"), ("key",)):
        sums = UsageSums(by=by)
        sums.add(sum_rows(ledger).items())
        assert sum(line.device_gib_ms for line in sums.result(0, 1).lines) == 48_000 + 1000
    invoice = InvoiceSums()
    invoice.add(sum_rows(ledger).items())
    lines = invoice.result("2024-10", complete=True, segments=0, checksum="").lines
    assert [(line.device_type, line.device_rate_nusd_per_gib_s, line.device_gib_ms) for line in lines] == [
        ("", 0, 0), ("H100", 7, 48_000), ("T4", 1, 1000),
    ]  # fmt: skip


def test_kept_devices_are_not_waived() -> None:
    row = msgspec.structs.replace(phase("a"), device_type="H100", device_bytes=1, device_rate_nusd_per_gib_s=3)
    assert not is_waived(group_of(entry(row, 0)))
