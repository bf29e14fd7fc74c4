"""Changes of which the audit log has no row yet: noted before they are made, and written by whoever can."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from fleetstart.controller.auth import audit_log
from fleetstart.controller.auth.audit_journal import UNKNOWN, AuditJournal, left_in
from fleetstart.controller.auth.audit_log import AuditLog
from fleetstart.controller.schemas.access import AuditEvent
from fleetstart.controller.state.redis_client import connect
from fleetstart.controller.storage.folder_store import FolderStore
from tests.controller.conftest import ControllerProcess
from tests.servers import RedisServer, wait_until


def event(verb: str, status: int = 0) -> AuditEvent:
    return AuditEvent(unix_ms=1, by="ci", verb=verb, status=status, code="" if status else UNKNOWN)


def test_what_is_left_is_what_was_begun_and_not_written(tmp_path: Path) -> None:
    journal = AuditJournal(tmp_path, "gw-1")
    written, unknown, late = (journal.begin(event(verb)) for verb in ("written", "unknown", "late"))
    journal.written(written)
    journal.ended(late, event("late", 200))
    data = (tmp_path / "gw-1.audit").read_bytes()
    assert [(one.verb, one.status) for one in left_in(data)] == [("unknown", 0), ("late", 200)]
    assert left_in(data[: len(data) // 2] + b'{"number":') != [], "a torn line spoils no other"
    assert list(AuditJournal(tmp_path, "gw-2").recover()) == [], "its controller lives"
    journal.written(unknown)
    journal.written(late)
    assert (tmp_path / "gw-1.audit").read_bytes() == b""


def test_changes_of_a_dead_controller_and_of_a_redis_that_was_away_are_written(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "LATE_EVERY_S", 0.02)
    killed = AuditJournal(tmp_path / "audit", "gw-1")
    killed.begin(event("secret.set"))
    os.close(killed._descriptor)

    async def scenario() -> None:
        client = connect(redis_server.url)
        log = AuditLog(client, FolderStore(tmp_path / "store"), lambda: 0, AuditJournal(tmp_path / "audit", "gw-2"))
        number = log.begin(event("function.deploy"))
        redis_server.kill()
        await log.end(number, event("function.deploy", 201))
        running = asyncio.create_task(log.run())
        await asyncio.to_thread(redis_server.start)
        async with asyncio.timeout(20):
            while len(found := await log.read(0, "", 10)) < 2:
                await asyncio.sleep(0.02)
        assert {(one.verb, one.status, one.code) for one in found} == {
            ("secret.set", 0, UNKNOWN),
            ("function.deploy", 201, ""),
        }
        async with asyncio.timeout(5):
            while sum(path.stat().st_size for path in (tmp_path / "audit").iterdir()):
                await asyncio.sleep(0.02)
        running.cancel()
        await client.aclose()

    asyncio.run(scenario())


def test_a_change_is_noted_until_its_row_is_written(controller: ControllerProcess, tmp_path: Path) -> None:
    assert controller.http.put("/api/v1/projects/ml", json={}).status_code == 200
    assert controller.http.get("/api/v1/audit").json()[0]["verb"] == "project.set"
    (journal,) = (tmp_path / "home" / "audit").iterdir()
    wait_until(lambda: not journal.stat().st_size, 5, what="a journal without rows")
