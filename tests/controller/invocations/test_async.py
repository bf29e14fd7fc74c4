"""Async invocations: accepted, polled, answered, cancelled, taken over, retried, swept; each once in the ledger."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from fleetstart.runtime.contract import keys
from fleetstart.runtime.contract.ids import InvocationId
from tests.controller.conftest import ControllerProcess, HandNode
from tests.controller.invocations.conftest import Client
from tests.servers import RedisServer, wait_until


@pytest.fixture
def second(redis_url: str, controller: ControllerProcess) -> Iterator[ControllerProcess]:
    other = ControllerProcess(controller.home.parent / "home2", redis_url, FS_STORE=str(controller.home / "store"))
    try:
        yield other.start()
    finally:
        other.close()


def test_a_call_is_accepted_polled_and_its_answer_kept(
    controller: ControllerProcess, node: HandNode, calls: Client
) -> None:
    controller.deploy("hello")
    answer = calls.post("hello/echo?x=1", b'{"a":1}', content_type="application/json", authorization="Bearer no")
    assert answer.status_code == 202
    assert answer.headers["preference-applied"] == "respond-async"
    info = answer.json()
    assert info["status"] in ("queued", "running")
    calls.until(info["id"], "succeeded")
    ended = wait_until(lambda: found if "row" in (found := calls.get(info["id"])) else None, what="its row")
    assert ended is not None
    assert ended["http_status"] == 200
    assert ended["result"]["path"] == "/echo"
    assert ended["result"]["query"] == "x=1"
    assert ended["result"]["body"] == '{"a":1}'
    assert "authorization" not in ended["result"]["headers"], "secrets are not written to the store"
    assert ended["result"]["headers"]["content-type"] == "application/json"
    assert ended["row"]["id"] == info["id"]
    assert ended["row"]["billed_ms"] == ended["billed_ms"]
    assert ended["timeline"]["phases"]
    assert [moment["what"] for moment in ended["history"]] == ["accepted", "started", "succeeded"]
    result = controller.http.get(f"/api/v1/invocations/{info['id']}/result")
    assert result.status_code == 200
    assert result.headers["content-type"] == "application/json"
    assert result.headers["x-request-id"] == info["id"]
    assert result.headers["x-own"] == "1"
    assert result.json() == ended["result"]
    assert [row["id"] for row in controller.rows("hello")] == [info["id"]]
    assert [one["id"] for one in calls.listed(function="hello", status="succeeded")] == [info["id"]]
    assert calls.listed(function="other") == []


def test_a_call_that_is_waited_for_is_answered_as_a_synchronous_one(
    controller: ControllerProcess, node: HandNode, calls: Client
) -> None:
    controller.deploy("hello")
    answer = calls.http.post("/fn/hello/echo", headers={"prefer": "respond-async, wait=20"})
    assert answer.status_code == 200
    assert answer.json()["path"] == "/echo"
    late = calls.http.post("/fn/hello/hold", headers={"prefer": "respond-async; wait=0"})
    assert late.status_code == 202
    (app,) = wait_until(lambda: [app for app in node.apps.values() if app.running])
    app.release.set()
    assert calls.get(late.json()["id"], prefer="wait=20")["status"] == "succeeded"


def test_what_could_not_be_served_is_not_accepted(controller: ControllerProcess, node: HandNode, calls: Client) -> None:
    controller.deploy("hello")
    unknown = calls.post("helo")
    assert unknown.status_code == 404
    assert "did you mean hello" in unknown.json()["error"]["hint"]
    assert calls.post("hello@9").status_code == 404
    assert calls.post("hello", fs_ttl_s="soon").status_code == 400
    assert calls.post("hello", fs_queue_timeout_s="0").status_code == 400
    assert calls.post("hello", b"x" * (5 << 20)).status_code == 413
    assert calls.http.post("/fn/hello", headers={"fs-webhook": "https://example.com"}).status_code == 400
    assert calls.post("hello", fs_webhook="http://169.254.169.254/latest").status_code == 400
    assert calls.post("hello", fs_webhook="ftp://example.com/").status_code == 400
    assert calls.listed() == []
    assert calls.http.get("/api/v1/invocations/inv-none/result").status_code == 404
    assert calls.http.delete("/api/v1/invocations/inv-none").status_code == 404


def test_the_same_id_is_the_same_call_and_no_other(
    controller: ControllerProcess, node: HandNode, calls: Client
) -> None:
    controller.deploy("hello")
    first = calls.accepted("hello/echo", b"one", x_request_id="mine-1")
    assert first == "mine-1"
    calls.until(first, "succeeded")
    again = calls.post("hello/echo", b"one", x_request_id="mine-1")
    assert again.status_code == 202
    assert again.json()["status"] == "succeeded"
    other = calls.post("hello/echo", b"two", x_request_id="mine-1")
    assert other.status_code == 409
    assert other.json()["error"]["code"] == "request_id_taken"
    assert sum(len(app.calls) for app in node.apps.values()) == 1


def test_cancelling_stops_the_worker_of_a_running_call(
    controller: ControllerProcess, node: HandNode, calls: Client
) -> None:
    controller.deploy("hello")
    running = calls.accepted("hello/hold")
    app = wait_until(lambda: next((app for app in node.apps.values() if app.running), None))
    assert app is not None
    calls.until(running, "running")
    answer = calls.http.delete(f"/api/v1/invocations/{running}")
    assert answer.status_code == 202
    wait_until(lambda: app.cancelled == [running], what="the worker to be told")
    ended = calls.until(running, "cancelled")
    assert "answer" not in ended
    assert calls.http.get(f"/api/v1/invocations/{running}/result").status_code == 410
    again = calls.http.post(f"/api/v1/invocations/{running}/cancel")
    assert (again.status_code, again.json()["status"]) == (200, "cancelled")
    wait_until(lambda: [row["status"] for row in controller.rows("hello")] == [499])


def test_cancelling_a_queued_call_runs_nothing(controller: ControllerProcess, node: HandNode, calls: Client) -> None:
    node.answer = lambda node, order: None  # workers never come
    controller.deploy("hello", scale={"max": 1})
    first = calls.accepted("hello/echo")
    calls.until(first, "running")
    second = calls.accepted("hello/echo")
    answer = calls.http.delete(f"/api/v1/invocations/{second}")
    assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")


def test_what_waits_too_long_expires(controller: ControllerProcess, node: HandNode, calls: Client) -> None:
    node.answer = lambda node, order: None
    controller.deploy("hello", scale={"max": 1})
    calls.until(calls.accepted("hello/echo"), "running")
    late = calls.accepted("hello/echo", fs_queue_timeout_s="1")
    ended = calls.until(late, "expired")
    assert ended["error"]["code"] == "expired"
    assert calls.http.get(f"/api/v1/invocations/{late}/result").status_code == 410


def test_a_handlers_own_error_is_the_answer_and_is_not_retried(
    controller: ControllerProcess, node: HandNode, calls: Client
) -> None:
    controller.deploy("hello", timeout_s=0.5)
    late = calls.accepted("hello/hold")
    ended = calls.until(late, "failed")
    assert ended["error"]["code"] == "deadline_exceeded"
    assert (ended["runs"], ended["dead_letter"]) == (1, False)
    assert ended["http_status"] == 504


def test_a_call_that_the_platform_loses_becomes_a_dead_letter_and_is_redriven(
    controller: ControllerProcess, node: HandNode, calls: Client
) -> None:
    controller.deploy("hello")
    lost = calls.accepted("hello/drop")
    ended = calls.until(lost, "failed", deadline_s=40)
    assert ended["error"]["code"] == "worker_lost"
    assert ended["dead_letter"]
    assert ended["runs"] == 4
    assert [one["id"] for one in calls.listed(dead=1)] == [lost]
    again = calls.http.post(f"/api/v1/invocations/{lost}/redrive")
    assert (again.status_code, again.json()["status"]) == (200, "queued")
    assert calls.listed(dead=1) == []
    refused = calls.http.post(f"/api/v1/invocations/{lost}/redrive")
    assert refused.status_code == 400


def test_a_killed_gateways_call_is_taken_over_and_billed_once(
    controller: ControllerProcess, second: ControllerProcess, node: HandNode, calls: Client, redis_server: RedisServer
) -> None:
    controller.deploy("hello")
    invocation = calls.accepted("hello/hold")
    others = Client(second)
    info = others.until(invocation, "running")
    wait_until(lambda: any(app.running for app in node.apps.values()))
    with redis_server.client() as client:
        gateway = json.loads(client.hget(keys.invocation(InvocationId(invocation)), "state") or b"")["gateway"]
    mine = controller.http.get("/api/v1/status").json()["gateway"] == gateway
    killed, survivor = (controller, others) if mine else (second, calls)
    killed.kill()
    wait_until(lambda: any(len(app.calls) > 1 for app in node.apps.values()) or len(node.apps) > 1, 20)
    for app in list(node.apps.values()):
        app.release.set()
    ended = survivor.until(invocation, "succeeded", deadline_s=20)
    assert "taken over from a gateway that is gone" in [moment["what"] for moment in ended["history"]]
    assert info["id"] == ended["id"]
    served = wait_until(
        lambda: [row["id"] for row in survivor.rows_of("hello") if row["status"] == 200], what="its row"
    )
    assert served == [invocation]


def test_a_gateway_that_goes_down_hands_its_calls_over(
    controller: ControllerProcess, second: ControllerProcess, node: HandNode, calls: Client, redis_server: RedisServer
) -> None:
    controller.deploy("hello")
    invocation = calls.accepted("hello/hold")
    others = Client(second)
    others.until(invocation, "running")
    with redis_server.client() as client:
        gateway = json.loads(client.hget(keys.invocation(InvocationId(invocation)), "state") or b"")["gateway"]
    mine = controller.http.get("/api/v1/status").json()["gateway"] == gateway
    ending, survivor = (controller, others) if mine else (second, calls)
    assert ending.process is not None
    os.kill(ending.process.pid, signal.SIGTERM)
    wait_until(lambda: ending.process is not None and ending.process.poll() is not None, 20)
    found = survivor.until(invocation, "running")
    for app in list(node.apps.values()):
        app.release.set()
    ended = survivor.until(invocation, "succeeded")
    assert found["runs"] == ended["runs"] == 2
    assert "handed back by a gateway that goes down" in [moment["what"] for moment in ended["history"]]


def test_a_controller_that_is_alone_finds_its_calls_again(
    controller: ControllerProcess, node: HandNode, calls: Client
) -> None:
    controller.deploy("hello")
    waiting = [calls.accepted("hello/echo", b"%d" % number) for number in range(5)]
    controller.kill()
    controller.start()
    for number, invocation in enumerate(waiting):
        assert calls.until(invocation, "succeeded", deadline_s=20)["result"]["body"] == str(number)


def test_calls_wait_for_their_turn_and_others_go_ahead(
    controller: ControllerProcess, node: HandNode, calls: Client
) -> None:
    controller.deploy("slow", scale={"max": 1})
    controller.deploy("quick", scale={"max": 1})
    slow = [calls.accepted("slow/hold") for _ in range(5)]
    quick = calls.accepted("quick/echo")
    calls.until(quick, "succeeded")
    app = wait_until(lambda: next((app for app in node.apps.values() if app.running), None))
    assert app is not None
    app.release.set()
    for invocation in slow:
        calls.until(invocation, "succeeded")
    assert app.most == 1


def test_kept_calls_are_swept_when_their_time_is_over(
    controller: ControllerProcess, node: HandNode, calls: Client, redis_server: RedisServer
) -> None:
    controller.deploy("hello")
    invocation = calls.accepted("hello/echo", fs_ttl_s="1")
    folder = controller.home / "store" / "invocations" / invocation
    assert (folder / "request").exists()
    wait_until(lambda: not folder.exists(), 15, what="the store to be swept")
    with redis_server.client() as client:
        left = [key for key in client.keys("fs:invocation*") if key != keys.INVOCATIONS_ADOPTED.encode()]
    assert left == []
    # Its trace is what is left of it, as of any other call.
    assert controller.http.get(f"/api/v1/invocations/{invocation}").json()["row"]["id"] == invocation


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


def test_a_past_call_is_replayed(controller: ControllerProcess, node: HandNode, calls: Client) -> None:
    controller.deploy("hello")
    past = calls.accepted("hello/echo?q=1", b"again")
    calls.until(past, "succeeded")
    answer = calls.http.post(f"/api/v1/invocations/{past}/replay", json={"version": 1})
    assert answer.status_code == 202
    assert answer.json()["target"] == "/fn/hello@1/echo?q=1"
    assert answer.json()["source"] == past
    ended = calls.until(answer.json()["id"], "succeeded")
    assert ended["result"]["body"] == "again"
    assert ended["origin"] == "replay"
    assert calls.http.post(f"/api/v1/invocations/{past}/replay", json={"version": 9}).status_code == 404
    assert calls.http.post(f"/api/v1/invocations/{past}/replay", json={"no": 9}).status_code == 400


def test_synchronous_calls_are_kept_where_the_function_asks_for_it(
    controller: ControllerProcess, node: HandNode, calls: Client
) -> None:
    controller.deploy("kept", keep_requests=True)
    controller.deploy("plain")
    answer = wait_until(lambda: calls.http.post("/fn/kept/echo", content=b"hello"))
    calls.http.post("/fn/plain/echo", content=b"hello")
    (one,) = wait_until(lambda: calls.listed(function="kept"))
    assert one["id"] == answer.headers["x-request-id"]
    assert (one["status"], one["origin"]) == ("succeeded", "sync")
    assert calls.get(one["id"])["result"] == answer.json()
    again = calls.http.post(f"/api/v1/invocations/{one['id']}/replay").json()
    assert calls.until(again["id"], "succeeded")["result"]["body"] == "hello"
    assert calls.listed(function="plain") == []
    assert calls.http.post(f"/api/v1/invocations/{one['id']}/redrive").status_code == 400


def test_what_redis_forgot_is_taken_up_from_the_store(
    controller: ControllerProcess, node: HandNode, calls: Client, redis_server: RedisServer
) -> None:
    controller.deploy("hello")
    done = calls.accepted("hello/echo", b"one")
    calls.until(done, "succeeded")
    with redis_server.client() as client:
        for key in client.keys("fs:invocation*"):
            client.delete(key)
    wait_until(lambda: [one["id"] for one in calls.listed()] == [done], 25, what="the store to be compared")
    assert calls.until(done, "succeeded")["result"]["body"] == "one"
