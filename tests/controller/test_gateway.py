"""Calls through a real controller to workers that keep the contract."""

from __future__ import annotations

from typing import Any

from tests.servers import wait_until


def test_a_cold_call_orders_a_worker_and_is_answered(controller: Any, node: Any) -> None:
    controller.deploy("hello")
    answer = controller.http.post("/fn/hello/a%20b/c?x=1&y=%2F", content=b"body", headers={"x-request-id": "req-1"})
    assert answer.status_code == 200, answer.text
    echo = answer.json()
    assert (echo["raw_path"], echo["query"], echo["method"], echo["body"]) == ("/a%20b/c", "x=1&y=%2F", "POST", "body")
    assert echo["headers"]["x-request-id"] == "req-1"
    assert answer.headers["x-request-id"] == "req-1"
    assert answer.headers["fs-version"] == "1"
    assert answer.headers["fs-start"] == "warm"
    assert answer.headers["fs-billed-ms"].isdigit()
    assert answer.headers["fs-cost"] != "spoofed"
    assert "queue;dur=" in answer.headers["server-timing"]
    assert answer.headers["x-own"] == "1"
    assert controller.http.get("/fn/hello").headers["fs-start"] == "hot"
    assert len(node.ordered()) == 1
    rows = wait_until(lambda: len(controller.rows("hello")) == 2 and controller.rows("hello"))
    assert [row["status"] for row in rows] == [200, 200]
