"""Money through the door: calls refused with 402, rows that carry rate and tags, sums that agree, kills in between."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from fleetstart.controller.schemas.functions import Invoice, LedgerLine, Usage
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.ledger import cost_nusd
from fleetstart.runtime.contract.billing.prices import FIRST, LEAD_MS
from fleetstart.runtime.contract.sizes import GIB
from tests.controller.conftest import ControllerProcess, HandNode
from tests.servers import RedisServer, wait_until


def usage(controller: ControllerProcess, **query: Any) -> Usage:
    answer = controller.http.get("/api/v1/usage", params=query)
    assert answer.status_code == 200, answer.text
    return msgspec.json.decode(answer.content, type=Usage)


def ledger(controller: ControllerProcess) -> list[LedgerLine]:
    answer = controller.http.get("/api/v1/ledger")
    assert answer.status_code == 200, answer.text
    return [msgspec.json.decode(line, type=LedgerLine) for line in answer.content.splitlines()]


def invoice(controller: ControllerProcess) -> Invoice:
    month = datetime.now(UTC).strftime("%Y-%m")
    return msgspec.json.decode(controller.http.get(f"/api/v1/invoices/{month}").content, type=Invoice)


def test_a_function_whose_budget_is_spent_is_refused_until_it_gets_more(
    controller: ControllerProcess, node: HandNode, redis_server: RedisServer
) -> None:
    controller.deploy("hello")
    controller.deploy("other")
    terms = {"limit_nusd": 1, "per": "month"}
    info = controller.http.put("/api/v1/budgets/hello", json=terms).json()
    assert (info["spent_nusd"], info["stage"], info["alert_percent"]) == (0, "ok", 80)
    assert controller.http.get("/fn/hello/sleep?s=0.05").status_code == 200
    refused = controller.http.get("/fn/hello")
    assert refused.status_code == 402
    error = refused.json()["error"]
    assert error["code"] == "budget_spent"
    assert "it renews at" in error["message"]
    [budget] = controller.http.get("/api/v1/budgets").json()
    left_s = budget["renews_unix_ms"] / 1000 - time.time()
    assert left_s - 60 <= int(refused.headers["retry-after"]) <= left_s + 60
    assert controller.http.get("/fn/other").status_code == 200
    wait_until(lambda: "a budget is spent: calls are refused" in controller.log(), what="a line in the log")
    [shown] = controller.http.get("/api/v1/status").json()["budgets"]
    assert (shown["function"], shown["stage"]) == ("hello", "spent")
    redis_server.kill()
    assert controller.http.get("/fn/hello").status_code == 402, "known without Redis"
    redis_server.start()
    wait_until(lambda: controller.http.put("/api/v1/budgets/hello", json={**terms, "limit_nusd": 10**9}).is_success)
    assert controller.http.get("/fn/hello").status_code == 200
    assert controller.http.delete("/api/v1/budgets/hello").json()["limit_nusd"] == 10**9
    assert controller.http.delete("/api/v1/budgets/hello").status_code == 404
    assert len([row for row in controller.rows("hello") if row["status"] == 402]) == 0, "what is refused has no row"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"limit_nusd": 0, "per": "day"}, 400),
        ({"limit_nusd": 5, "per": "year"}, 400),
        ({"limit_nusd": 5, "per": "day", "alert_percent": 0}, 400),
        ({"limit_nusd": "5", "per": "day"}, 400),
        ({"limit_nusd": 5, "per": "day", "hard": True}, 400),
        ({"limit_nusd": 10**40, "per": "day"}, 400),
    ],
)
def test_budgets_that_make_no_sense(controller: ControllerProcess, body: dict[str, Any], status: int) -> None:
    controller.deploy("hello")
    assert controller.http.put("/api/v1/budgets/hello", json=body).status_code == status
    assert controller.http.put("/api/v1/budgets/nobody", json={"limit_nusd": 5, "per": "day"}).status_code == 404


def test_the_audit_log_shows_that_budgets_and_prices_changed(controller: ControllerProcess) -> None:
    controller.deploy("hello")
    for limit_nusd in (5, 6, 6):
        assert controller.http.put("/api/v1/budgets/hello", json={"limit_nusd": limit_nusd, "per": "day"}).is_success
    assert controller.http.delete("/api/v1/budgets/hello").is_success
    rates = {"execute_nusd_per_gib_s": 1, "idle_nusd_per_gib_s": 1}
    later = {"from_unix_ms": int(time.time() * 1000) + 600_000, **rates}
    assert controller.http.post("/api/v1/prices", json=later).status_code == 201
    _, *changes = reversed(controller.http.get("/api/v1/audit").json())
    five, six, same, gone, price = [(one.get("before", ""), one.get("after", "")) for one in changes]
    assert five[0] == gone[1] == "" != five[1] == six[0] != six[1]
    assert same == (six[1], six[1]) == (gone[0], gone[0]), "set to what it was"
    assert "" != price[0] != price[1] != ""


def test_a_price_sheet_without_a_time_begins_a_minute_after_the_servers_now(controller: ControllerProcess) -> None:
    """A client's clock may be behind: what it took for a minute ahead was too early."""
    rates = {"execute_nusd_per_gib_s": 1, "idle_nusd_per_gib_s": 1}
    before_unix_ms = int(time.time() * 1000)
    sheet = controller.http.post("/api/v1/prices", json=rates)
    assert sheet.status_code == 201
    assert before_unix_ms <= sheet.json()["from_unix_ms"] - LEAD_MS <= int(time.time() * 1000)
    later = {"from_unix_ms": before_unix_ms + 600_000, **rates}
    assert controller.http.post("/api/v1/prices", json=later).status_code == 201
    again = controller.http.post("/api/v1/prices", json=rates)
    assert (again.status_code, "is the earliest" in again.json()["error"]["message"]) == (400, True), "one is to come"


@pytest.mark.parametrize("path", ["usage", "ledger"])
def test_a_time_span_that_ends_before_it_begins_is_no_empty_bill(controller: ControllerProcess, path: str) -> None:
    refused = controller.http.get(f"/api/v1/{path}", params={"since_unix_ms": 2000, "until_unix_ms": 1000})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_input")
    later = int(time.time() * 1000) + 60_000  # by a client's clock that is ahead
    assert controller.http.get(f"/api/v1/{path}", params={"since_unix_ms": later}).status_code == 200


def test_rows_carry_the_rate_that_applied_and_the_tags(
    controller: ControllerProcess, node: HandNode, redis_server: RedisServer
) -> None:
    later = msgspec.structs.replace(FIRST, version=2, from_unix_ms=1000, execute_nusd_per_gib_s=10**6)
    with redis_server.client() as client:
        client.hset(keys.PRICES, "2", msgspec.json.encode(later))
    wait_until(lambda: len(controller.http.get("/api/v1/prices").json()) == 2)
    controller.deploy("hello", tags={"team": "ml"}, memory_bytes=GIB)
    wait_until(
        lambda: controller.http.get("/fn/hello/sleep?s=0.02").headers["fs-cost"] > "0.00001", what="the new rate"
    )
    wait_until(
        lambda: controller.rows("hello") and controller.rows("hello")[0]["price"] == 2, what="a row of the new rate"
    )
    row = controller.rows("hello")[0]
    assert (row["price"], row["rate_nusd_per_gib_s"], row["tags"]) == (2, 10**6, {"team": "ml"})
    assert row["cost_nusd"] == cost_nusd(row["billed_ms"], GIB, 10**6) > 0
    [line] = usage(controller, by="tag:team").lines
    assert (line.tag, line.cost_nusd) == ("ml", sum(row["cost_nusd"] for row in controller.rows("hello")))
    for kept in ({"from_unix_ms": 0}, {"from_unix_ms": int(time.time() * 1000)}):
        new = {"execute_nusd_per_gib_s": 1, "idle_nusd_per_gib_s": 1, **kept}
        assert controller.http.post("/api/v1/prices", json=new).status_code == 400
    new = {"from_unix_ms": int(time.time() * 1000) + 70_000, "execute_nusd_per_gib_s": 1, "idle_nusd_per_gib_s": 1}
    assert controller.http.post("/api/v1/prices", json=new).json()["version"] == 3


@pytest.mark.parametrize(
    "path",
    [
        "usage?by=functoin",
        "usage?since_unix_ms=-1",
        "usage?until_unix_ms=x",
        "invoices/2026-13",
        "ledger?since_unix_ms=²",
    ],
)
def test_what_cannot_be_answered_is_refused_in_words(controller: ControllerProcess, path: str) -> None:
    answer = controller.http.get(f"/api/v1/{path}")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


@pytest.fixture
def small_segments(redis_url: str, tmp_path: Path) -> Iterator[ControllerProcess]:
    process = ControllerProcess(tmp_path / "home", redis_url, FS_SEGMENT_ROWS="50")
    try:
        yield process.start()
    finally:
        process.close()


def test_kills_of_controller_and_redis_leave_every_call_once_in_segments_and_stream(
    small_segments: ControllerProcess, node: HandNode, redis_server: RedisServer
) -> None:
    controller = small_segments
    controller.deploy("hello", concurrency=8)
    asked: list[str] = []
    for turn in range(4):
        for i in range(60):
            name = f"call-{turn}-{i}"
            asked.append(_until_answered(controller, name))
            if i == 30 and turn % 2:
                controller.kill()
                controller.start()
            elif i == 30 and turn:
                redis_server.kill()
                redis_server.start()
    wait_until(lambda: {line.row.id for line in ledger(controller)} >= set(asked), 20, what="every call")
    wait_until(lambda: invoice(controller).segments >= 3, 20, what="segments")
    lines = ledger(controller)
    counts = Counter(line.row.id for line in lines)
    assert [name for name in asked if counts[name] != 1] == []
    assert max(counts.values()) == 1
    entries = [tuple(map(int, line.entry.split("-"))) for line in lines]
    assert entries == sorted(set(entries))
    bill, total = invoice(controller), sum(line.row.cost_nusd for line in lines)
    assert (bill.total_nusd, bill.rows) == (total, len(lines))
    for by in ("function,version,phase", "day", "tag", "key"):
        assert usage(controller, by=by).total_nusd == total
    assert [row["id"] for row in controller.rows("hello")] == [line.row.id for line in reversed(lines)]


def _until_answered(controller: ControllerProcess, name: str) -> str:
    """The id under which it was answered."""

    def answered() -> str:
        with contextlib.suppress(httpx.TransportError):
            answer = controller.http.get("/fn/hello", headers={"x-request-id": name})
            return answer.headers["x-request-id"] if answer.status_code == 200 else ""
        return ""

    return wait_until(answered, 20, what=name)
