"""Async invocations: accepted, polled, answered, cancelled, taken over, retried, swept; each once in the ledger."""

from __future__ import annotations

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.ledger import dollars
from fleetstart.runtime.contract.node.orders import WorkerOrder
from tests.controller.async_invocations.conftest import Client
from tests.controller.conftest import ControllerProcess, HandNode
from tests.servers import RedisServer, wait_until


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


def test_an_id_that_its_caller_gives_is_kept_beside_its_own(
    controller: ControllerProcess, node: HandNode, calls: Client
) -> None:
    controller.deploy("hello")
    ids = [calls.accepted("hello/echo", body, x_request_id="mine-1") for body in (b"one", b"one", b"two")]
    assert len(set(ids)) == 3
    for one in ids:
        calls.until(one, "succeeded")
    rows = wait_until(lambda: found if len(found := controller.rows("hello")) == 3 else [])
    assert {row["request_id"] for row in rows} == {"mine-1"}


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
    billed = wait_until(lambda: found if "row" in (found := calls.get(running)) else None, what="its row")
    assert billed is not None
    (row,) = controller.rows("hello")
    assert (billed["billed_ms"], billed["cost"]) == (row["billed_ms"], dollars(row["cost_nusd"])), "what it costs"
    assert billed["version"] == 1
    (listed,) = calls.listed(status="cancelled")
    assert (listed["billed_ms"], listed["cost"]) == (billed["billed_ms"], billed["cost"]), "in a listing, too"


def test_a_queued_call_does_not_go_to_another_function_that_takes_the_name(
    controller: ControllerProcess, node: HandNode, calls: Client
) -> None:
    controller.deploy("hello", scale={"max": 1})
    calls.until(calls.accepted("hello/hold"), "running")
    (app,) = wait_until(lambda: [app for app in node.apps.values() if app.running])
    queued = calls.accepted("hello/echo", b"for the first one")
    assert controller.http.delete("/api/v1/functions/hello").status_code in (200, 204)
    controller.deploy("hello")
    app.release.set()
    ended = calls.until(queued, "failed")
    assert ended["http_status"] == 404
    assert "was removed, and another one has its name" in ended["error"]["message"]
    assert calls.until(calls.accepted("hello/echo"), "succeeded")["version"] == 2
    again = calls.http.post(f"/api/v1/invocations/{queued}/redrive")
    assert again.status_code == 200, again.text
    assert calls.until(queued, "failed")["http_status"] == 404


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
    first = calls.accepted("hello/echo", fs_queue_timeout_s="2")
    calls.until(first, "running")
    late = calls.accepted("hello/echo", fs_queue_timeout_s="1")
    ended = calls.until(late, "expired")
    assert ended["error"]["code"] == "expired"
    assert calls.until(first, "expired")["error"]["code"] == "queue_timeout", "at the worker's queue, too"
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


def test_a_start_longer_than_the_call_may_run_fails_nothing(
    controller: ControllerProcess, node: HandNode, calls: Client
) -> None:
    """The wait for a worker is the call's `Fs-Queue-Timeout-S`, not its `timeout_s`."""
    held: list[WorkerOrder] = []
    node.answer = lambda node, order: held.append(order)
    controller.deploy("hello", timeout_s=0.5)
    waits = calls.accepted("hello/echo")
    wait_until(lambda: calls.get(waits)["runs"] > 1, what="a run without a worker")
    node.answer = HandNode.serve
    for order in held:
        node.serve(order)
    ended = calls.until(waits, "succeeded")
    assert "deadline_exceeded" in " ".join(moment["what"] for moment in ended["history"])
    assert sum(len(app.calls) for app in node.apps.values()) == 1


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
    with redis_server.client() as client:  # swept from Redis after the store, so that no kill leaves objects behind
        wait_until(
            lambda: set(client.keys("fs:invocation*")) <= {keys.INVOCATIONS_ADOPTED.encode()},
            5,
            what="redis to be swept",
        )
    # Its trace is what is left of it, as of any other call.
    assert controller.http.get(f"/api/v1/invocations/{invocation}").json()["row"]["id"] == invocation


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
