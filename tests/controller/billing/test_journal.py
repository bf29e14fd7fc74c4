"""The journal on a disk that is full: a row is there whole or not at all, and none is glued to half a one."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fleetstart.controller.billing import journal_overflow, ledger_writer
from fleetstart.controller.billing.journal import Journal, rows_in
from fleetstart.controller.billing.journal_overflow import JournalOverflow
from fleetstart.controller.billing.ledger_writer import PHASES_KEPT, LedgerWriter, bounded
from fleetstart.controller.state.redis_client import connect
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.ledger import InvocationRow, InvocationTrace
from fleetstart.runtime.contract.ids import FunctionName, InvocationId, Version
from fleetstart.runtime.contract.timeline import Timeline
from tests.servers import RedisServer


def row(name: str) -> InvocationRow:
    return InvocationRow(
        id=InvocationId(name),
        function=FunctionName("f"),
        version=Version(1),
        status=200,
        accepted_unix_ms=1,
        queue_ms=0,
        billed_ms=1,
        memory_bytes=1,
        cost_nusd=1,
    )


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """The kernel takes what fits of a write, and refuses the rest, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def written(folder: Path) -> list[str]:
    return [one.id for path in sorted(folder.glob("*.rows")) for one in rows_in(path.read_bytes())]


def test_a_row_that_does_not_fit_leaves_no_half_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "gw")
    journal.append(row("first"))
    first_bytes = (tmp_path / "gw.rows").stat().st_size
    with files_of_at_most(first_bytes * 3 // 2):
        journal.append(row("none"))
        assert (tmp_path / "gw.rows").stat().st_size == first_bytes
    journal.append(row("later"))
    assert written(tmp_path) == ["first", "later"]
    asyncio.run(journal.settle(lambda: [row("first"), row("none"), row("later")]))
    assert written(tmp_path) == ["first", "none", "later"], "once there is room"


def test_a_file_that_cannot_be_rewritten_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path, "gw")
    names = [f"call-{number}" for number in range(6000)]
    for name in names:
        journal.append(row(name))
    with files_of_at_most(10_000):
        asyncio.run(journal.settle(lambda: [row(name) for name in names[:3000]]))
    assert "the journal cannot be shortened" in caplog.text
    assert written(tmp_path) == names
    assert list(tmp_path.glob("*.new")) == []
    asyncio.run(journal.settle(lambda: [row(name) for name in names[:10]]))
    assert written(tmp_path) == names[:10]


def test_rows_that_come_while_the_file_is_rewritten_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        journal = Journal(tmp_path, "gw")
        for number in range(6000):
            journal.append(row(f"call-{number}"))
        settling = asyncio.create_task(journal.settle(lambda: [row("left")]))
        for number in range(50):
            await asyncio.sleep(0)
            journal.append(row(f"meanwhile-{number}"))
        await settling
        assert set(written(tmp_path)) >= {"left", *(f"meanwhile-{number}" for number in range(50))}
        journal.close()

    asyncio.run(scenario())
    assert len(list(Journal(tmp_path, "next").recover())) >= 51


def test_rows_of_an_outage_wait_in_files_and_are_written_once(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_writer, "ROWS_HELD", 20)
    monkeypatch.setattr(journal_overflow, "FILE_BYTES", 4_000)

    async def scenario() -> None:
        client = connect(redis_server.url)
        journal, overflow = Journal(tmp_path, "gw"), JournalOverflow(tmp_path, "gw")
        writer = LedgerWriter(client, journal, overflow=overflow)
        names = [f"call-{number:03}" for number in range(200)]
        for name in names:
            writer.ended(InvocationTrace(row=row(name), timeline=Timeline()))
        assert len(list(writer.unwritten)) == 20
        assert len(list(tmp_path.glob("gw-*.rows"))) > 5
        await writer.flush()
        entries: Any = await client.xrange(keys.LEDGER)
        assert sorted(one.id for _, fields in entries for one in rows_in(fields[b"row"])) == names
        assert list(tmp_path.glob("gw-*.rows")) == []
        await client.aclose()

    asyncio.run(scenario())


def test_the_overflow_has_a_size_and_counts_what_it_loses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_overflow, "FILE_BYTES", 4_000)
    overflow = JournalOverflow(tmp_path, "gw", max_bytes=20_000)
    kept = sum(overflow.add(row(f"call-{number}")) for number in range(200))
    assert (overflow.lost, kept) == (200 - kept, kept)
    assert 20_000 <= sum(path.stat().st_size for path in tmp_path.iterdir()) < 25_000
    assert [one.id for one in overflow.oldest()][:2] == ["call-0", "call-1"]
    overflow.close()
    assert len(list(Journal(tmp_path, "next").recover())) == kept, "the next controller has them"


def test_a_trace_keeps_the_ends_of_a_long_timeline() -> None:
    timeline = Timeline()
    for number in range(3 * PHASES_KEPT):
        timeline.add("call", number, number + 1)
    kept = bounded(InvocationTrace(row=row("many"), timeline=timeline)).timeline.phases
    assert (len(kept), kept[0], kept[-1]) == (PHASES_KEPT, timeline.phases[0], timeline.phases[-1])
