"""History and events of a real controller: what was called, changed and failed; what a limited key sees of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest

from fleetstart.controller.schemas.history import CallHistory, SystemEvent
from fleetstart.runtime.contract.node.orders import WorkerOrder
from tests.controller.conftest import ControllerProcess, HandNode
from tests.servers import RedisServer, wait_until


@pytest.fixture
def served(controller: ControllerProcess, redis_server: RedisServer) -> Iterator[ControllerProcess]:
    node = HandNode(redis_server)
    node.answer = answer
    node.start()
    try:
        yield controller
    finally:
        node.close()


def answer(node: HandNode, order: WorkerOrder) -> None:
    if order.spec.name == "broken" and order.wanted == "run":
        node.fail(order, "start_failed", "no room for it")
    else:
        node.serve(order)


def history(client: httpx.Client, **query: Any) -> CallHistory:
    got = client.get("/api/v1/history", params=query)
    assert got.status_code == 200, got.text
    return msgspec.json.decode(got.content, type=CallHistory)


def events(client: httpx.Client, **query: Any) -> list[SystemEvent]:
    got = client.get("/api/v1/events", params=query)
    assert got.status_code == 200, got.text
    return msgspec.json.decode(got.content, type=list[SystemEvent])


def soon(read: Callable[[], CallHistory], calls: int) -> CallHistory:
    """The history when that many calls are in it: it is written a second later."""
    wait_until(lambda: read().total.calls >= calls, what=f"{calls} calls in the history")
    return read()


def test_calls_errors_and_starts_are_counted_for_each_function_and_for_all(served: ControllerProcess) -> None:
    for name in ("good", "broken"):
        served.deploy(name)
    for path in ("/a", "/b", "/status/418"):
        served.http.post(f"/fn/good{path}", content=b"x")
    assert served.http.post("/fn/broken", content=b"x").status_code == 500
    everything = soon(lambda: history(served.http), 4).total
    good = history(served.http, function="good", range="1h")
    rows = served.rows("good")
    assert (good.total.calls, good.total.warm, good.total.cost_nusd) == (
        len(rows), 1, sum(row["cost_nusd"] for row in rows),
    )  # fmt: skip
    assert good.total.refused == sum(400 <= row["status"] < 499 for row in rows)
    assert (good.step_s, len(good.points), sum(point.calls for point in good.points)) == (60, 60, good.total.calls)
    assert everything.failed == 1
    assert everything.calls == good.total.calls + 1
    assert history(served.http, function="broken", range="30d").total.failed == 1
    point = history(served.http, range="1h").points[-1]
    span = {"since_unix_ms": point.begin_unix_ms - 3_600_000, "until_unix_ms": point.begin_unix_ms + 60_000}
    by_function = served.http.get("/api/v1/history/functions", params=span).json()
    assert [(one["function"], one["total"]["calls"]) for one in by_function] == [
        ("broken", 1),
        ("good", good.total.calls),
    ]
    for since, until in ((5, 5), (7, 5), (0, 25 * 3_600_000)):
        wrong = {"since_unix_ms": since, "until_unix_ms": until}
        assert served.http.get("/api/v1/history/functions", params=wrong).status_code == 400
    assert served.http.get("/api/v1/events", params={"until_unix_ms": 0}).json() == []


def test_deploys_changes_and_failed_starts_are_events(served: ControllerProcess) -> None:
    for name in ("good", "broken"):
        served.deploy(name)
    served.http.put("/api/v1/functions/good/scale", json={"min": 0, "max": 2}).raise_for_status()
    assert served.http.put("/api/v1/functions/none/scale", json={"min": 0, "max": 2}).status_code == 404
    served.http.post("/fn/broken", content=b"x")
    served.http.put("/api/v1/nodes/node-1/drain").raise_for_status()
    wait_until(lambda: any(event.kind == "failure" for event in events(served.http)), what="the failed start")
    found = events(served.http)
    assert [event.unix_ms for event in found] == sorted((event.unix_ms for event in found), reverse=True)
    assert {(event.kind, event.function, event.text.partition(":")[0]) for event in found} >= {
        ("deploy", "good", "deployed"), ("deploy", "broken", "deployed"), ("change", "good", "scale changed"),
        ("failure", "broken", "a start failed"), ("node", "", "node-1 is drained"),
    }  # fmt: skip
    assert "no room for it" in next(event.text for event in found if event.kind == "failure")
    assert {event.function for event in events(served.http, function="good")} == {"good", ""}
    assert events(served.http, until_unix_ms=found[-1].unix_ms) == []
    assert len(events(served.http, limit=1)) == 1


def test_a_limited_key_sees_its_own_functions_only(served: ControllerProcess) -> None:
    for name in ("good", "other"):
        served.deploy(name)
        served.http.post(f"/fn/{name}", content=b"x")
    soon(lambda: history(served.http), 2)
    served.http.put("/api/v1/nodes/node-1/drain").raise_for_status()
    keys = {}
    for name, rights, functions in (("admin", "admin", []), ("mine", "read", ["good"]), ("caller", "invoke", ["good"])):
        made = served.http.post("/api/v1/keys", json={"name": name, "rights": [rights], "functions": functions})
        keys[name] = {"authorization": f"Bearer {made.json()['key']}"}
        served.http.headers.setdefault("authorization", keys[name]["authorization"])
    with httpx.Client(base_url=served.url, timeout=30, headers=keys["mine"]) as mine:
        assert history(mine).total.calls == history(mine, function="good").total.calls == 1
        assert mine.get("/api/v1/history?function=other").status_code == 404
        assert [one["function"] for one in mine.get("/api/v1/history/functions").json()] == ["good"]
        assert mine.get("/api/v1/events?function=other").status_code == 404
        assert {(event.kind, event.function) for event in events(mine)} == {("deploy", "good")}
    with httpx.Client(base_url=served.url, timeout=30, headers=keys["caller"]) as caller:
        assert caller.get("/api/v1/history").status_code == caller.get("/api/v1/events").status_code == 403


def test_the_history_outlives_the_function_and_the_controller(served: ControllerProcess) -> None:
    served.deploy("good")
    served.http.post("/fn/good", content=b"x")
    soon(lambda: history(served.http, function="good"), 1)
    served.kill()
    served.start()
    served.http.post("/fn/good", content=b"x")
    soon(lambda: history(served.http, function="good"), 2)
    served.http.delete("/api/v1/functions/good").raise_for_status()
    assert history(served.http, function="good").total.calls == 2
    assert served.http.get("/api/v1/history?function=never").status_code == 404
    refused = served.http.get("/api/v1/history?range=2h")
    assert (refused.status_code, refused.json()["error"]["hint"]) == (400, "one of 1h, 6h, 24h, 7d, 30d")


def test_invocations_are_listed_by_time_and_by_failure(served: ControllerProcess) -> None:
    served.deploy("good")
    served.deploy("broken")
    served.http.post("/fn/good", content=b"x")
    wait_until(lambda: len(served.rows("good")) == 1, what="the row")
    middle = time.time_ns() // 1_000_000
    served.http.post("/fn/broken", content=b"x")
    served.http.post("/fn/good", content=b"x")
    wait_until(lambda: len(served.rows("")) == 3, what="the rows")

    def found(**query: Any) -> list[str]:
        rows = served.http.get("/api/v1/invocations", params=query).json()
        return [row["function"] for row in rows]

    assert found(until_unix_ms=middle + 1) == ["good"]
    assert found(since_unix_ms=middle + 1) == ["good", "broken"]
    assert found(since_unix_ms=middle + 1, until_unix_ms=middle + 10**6, limit=1) == ["good"]
    assert found(failed=1) == ["broken"]
    assert found(failed=1, function="good") == []
