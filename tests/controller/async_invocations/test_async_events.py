"""Events and progress of async invocations, read again from where one left."""

from __future__ import annotations

import json
import threading

import pytest

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.ids import InvocationId
from tests.controller.async_invocations.conftest import Client
from tests.controller.conftest import ControllerProcess, HandNode
from tests.servers import RedisServer, wait_until


@pytest.mark.parametrize("path", ["hello/gate", "hello/told"])
def test_a_stream_that_is_cancelled_is_cancelled_and_not_lost(
    controller: ControllerProcess, node: HandNode, calls: Client, path: str
) -> None:
    controller.deploy("hello")
    invocation = calls.accepted(path)
    with calls.http.stream("GET", f"/api/v1/invocations/{invocation}/events") as response:
        assert next(response.iter_lines()) == "id: 1-1"  # it has begun
    assert calls.http.delete(f"/api/v1/invocations/{invocation}").status_code == 202
    assert calls.until(invocation, "cancelled")["error"] is None
    assert calls.http.get(f"/api/v1/invocations/{invocation}/result").status_code == 410


def test_events_of_a_stream_are_read_again_from_where_one_left(
    controller: ControllerProcess, node: HandNode, calls: Client
) -> None:
    controller.deploy("hello")
    invocation = calls.accepted("hello/gate")
    url = f"/api/v1/invocations/{invocation}/events"
    app = wait_until(lambda: next((app for app in node.apps.values() if app.running), None))
    assert app is not None
    with calls.http.stream("GET", url) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()
        assert [next(lines), next(lines)] == ["id: 1-1", "data: first"]
    reader = threading.Thread(target=app.release.set)
    reader.start()
    rest = calls.http.get(url, headers={"last-event-id": "1-1"}).text
    reader.join()
    events = [block.splitlines() for block in rest.split("\n\n") if block]
    assert events[0] == ["id: 1-2", "data: second"]
    assert events[1][:2] == ["id: 1-3", "event: fleetstart"]
    assert events[2][:2] == ["id: 1-4", "event: invocation"]
    assert json.loads(events[2][2].removeprefix("data: "))["status"] == "succeeded"
    assert calls.http.get(url, headers={"last-event-id": "1-4"}).status_code == 204
    assert calls.http.get(url, headers={"last-event-id": "4"}).status_code == 400
    ended = wait_until(lambda: found if "row" in (found := calls.get(invocation)) else None, what="its row")
    assert ended is not None
    assert ended["content_type"].startswith("text/event-stream")
    assert ended["billed_ms"] == ended["row"]["billed_ms"]


def test_the_progress_of_a_call_is_told_and_leaves_its_answer_alone(
    controller: ControllerProcess, node: HandNode, calls: Client
) -> None:
    controller.deploy("hello")
    invocation = calls.accepted("hello/told", fs_progress="no caller's")
    told = wait_until(lambda: calls.get(invocation).get("progress"), 15, what="its progress")
    assert told is not None
    assert (told["fraction"], told["message"]) == (0.5, "half")
    assert calls.listed()[0]["progress"] == told
    url = f"/api/v1/invocations/{invocation}/events"
    with calls.http.stream("GET", url) as response:
        lines = response.iter_lines()
        assert [next(lines), next(lines)] == ["id: 1-1", "event: progress"]
    for app in node.apps.values():
        app.release.set()
    ended = calls.until(invocation, "succeeded")
    assert (ended["http_status"], ended["result"], ended["progress"]["fraction"]) == (201, {"done": 1}, 1.0)
    assert (ended["version"], ended["start"]) == (1, "warm")
    assert ended["cost"] != "spoofed"
    result = controller.http.get(f"/api/v1/invocations/{invocation}/result")
    assert (result.status_code, result.content, result.headers["x-own"]) == (201, b'{"done":1}', "1")
    assert "fs-progress" not in result.headers
    rest = calls.http.get(url, headers={"last-event-id": "1-1"}).text
    kinds = [block.splitlines()[1] for block in rest.split("\n\n") if block]
    assert kinds == ["event: progress", "event: fleetstart", "event: invocation"]


def test_a_stream_that_its_worker_cuts_at_the_deadline_is_late_and_not_lost(
    controller: ControllerProcess, node: HandNode, calls: Client
) -> None:
    controller.deploy("hello", timeout_s=1)
    invocation = calls.accepted("hello/late")
    failed = calls.until(invocation, "failed")
    assert (failed["error"]["code"], failed["runs"]) == ("deadline_exceeded", 1), (
        "it would be run again if it were lost"
    )


def test_a_reader_who_was_away_too_long_is_told_so(
    controller: ControllerProcess, node: HandNode, calls: Client, redis_server: RedisServer
) -> None:
    controller.deploy("hello")
    invocation = calls.accepted("hello/stream")
    calls.until(invocation, "succeeded")
    with redis_server.client() as client:
        client.xtrim(keys.invocation_events(InvocationId(invocation)), maxlen=1, approximate=False)
    gone = calls.http.get(f"/api/v1/invocations/{invocation}/events")
    assert gone.status_code == 410
    assert gone.json()["error"]["code"] == "events_gone"
    assert "result_url" in gone.json()["error"]["hint"]


def test_a_bill_that_the_function_writes_is_not_taken_for_ours(
    controller: ControllerProcess, node: HandNode, calls: Client
) -> None:
    controller.deploy("hello")
    invocation = calls.accepted("hello/forged")
    calls.until(invocation, "succeeded")
    ended = wait_until(lambda: found if "row" in (found := calls.get(invocation)) else None, what="its row")
    assert ended is not None
    assert ended["billed_ms"] == ended["row"]["billed_ms"] != 987654321
    assert "0.123456789" not in str({name: value for name, value in ended.items() if name != "result"})
