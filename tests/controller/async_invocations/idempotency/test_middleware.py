"""Idempotency keys: one run, the same answer for all; another call under the key is refused; failures free it."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest

from fleetstart.controller.async_invocations.idempotency.silence import KEPT_WATCHED_S, RUNNING_MS
from fleetstart.controller.async_invocations.idempotency.store import KeyClaim
from fleetstart.runtime.contract import redis_keys as keys
from tests.controller.async_invocations.conftest import ASYNC, Client
from tests.controller.conftest import ControllerProcess, HandNode
from tests.servers import RedisServer, wait_until


def call(controller: ControllerProcess, path: str, key: str, body: bytes = b"", **headers: str) -> httpx.Response:
    return controller.http.post(f"/fn/{path}", content=body, headers={"idempotency-key": key, **headers})


def runs(node: HandNode) -> int:
    return sum(len(app.calls) for app in node.apps.values())


def test_a_call_that_is_sent_again_gets_the_same_answer_and_is_billed_once(
    controller: ControllerProcess, node: HandNode
) -> None:
    controller.deploy("hello")
    first = call(controller, "hello/echo", "k1", b"same")
    assert first.status_code == 200
    assert "idempotent-replayed" not in first.headers
    again = call(controller, "hello/echo", "k1", b"same")
    assert again.headers["idempotent-replayed"] == "true"
    assert again.content == first.content
    assert again.headers["x-request-id"] == first.headers["x-request-id"]
    assert again.headers["fs-cost"] == first.headers["fs-cost"]
    assert runs(node) == 1
    assert wait_until(lambda: controller.rows("hello"))[0]["id"] == first.headers["x-request-id"]
    assert len(controller.rows("hello")) == 1
    assert call(controller, "hello/echo", "k2", b"same").status_code == 200
    assert runs(node) == 2


def test_the_answers_of_a_removed_function_are_not_those_of_the_next_of_its_name(
    controller: ControllerProcess, node: HandNode
) -> None:
    """They were replayed for a day, to whoever had the name by then."""
    controller.deploy("hello")
    asked: dict[str, dict[str, str]] = {"sync": {}, "async": {**ASYNC, "prefer": "respond-async, wait=10"}}
    for key, headers in asked.items():
        assert call(controller, "hello/echo", key, b"", **headers).headers["fs-version"] == "1"
    assert controller.http.delete("/api/v1/functions/hello").status_code == 200
    controller.deploy("hello")
    for key, headers in asked.items():
        answers = [call(controller, "hello/echo", key, b"", **headers) for _ in range(2)]
        assert [answer.headers["fs-version"] for answer in answers] == ["2", "2"]
        assert ["idempotent-replayed" in answer.headers for answer in answers] == [False, True]


@pytest.mark.parametrize(
    ("path", "body"), [("hello/echo", b"other"), ("hello/other", b"same"), ("hello/echo?q=1", b"same")]
)
def test_another_call_under_the_key_is_refused(
    controller: ControllerProcess, node: HandNode, path: str, body: bytes
) -> None:
    controller.deploy("hello")
    call(controller, "hello/echo", "k1", b"same")
    refused = call(controller, path, "k1", body)
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "idempotency_mismatch"
    assert runs(node) == 1


def test_another_user_of_the_function_under_the_key_is_refused(controller: ControllerProcess, node: HandNode) -> None:
    """An app's users may choose the same key: neither gets the other's answer."""
    controller.deploy("hello")
    for number, name in enumerate(("authorization", "cookie")):
        first = {"idempotency-key": f"k{number}", name: "user=ada"}
        assert controller.http.post("/fn/hello/echo", content=b"x", headers=first).status_code == 200
        again = controller.http.post("/fn/hello/echo", content=b"x", headers=first)
        assert (again.status_code, again.headers["idempotent-replayed"]) == (200, "true")
        other = controller.http.post("/fn/hello/echo", content=b"x", headers={**first, name: "user=bob"})
        assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_mismatch")


def test_calls_at_the_same_time_are_one_run(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello", concurrency=10)
    with ThreadPoolExecutor(5) as pool:
        pending = [pool.submit(call, controller, "hello/hold", "k1") for _ in range(5)]
        app = wait_until(lambda: next((app for app in node.apps.values() if app.running), None))
        assert app is not None
        app.release.set()
        answers = [one.result(20) for one in pending]
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    assert sorted("idempotent-replayed" in answer.headers for answer in answers) == [False, True, True, True, True]
    assert runs(node) == 1


def test_a_client_that_leaves_finds_the_answer_when_it_comes_back(
    controller: ControllerProcess, node: HandNode
) -> None:
    controller.deploy("hello")
    with pytest.raises(httpx.ReadTimeout):
        controller.http.post("/fn/hello/hold", headers={"idempotency-key": "k1"}, timeout=1.0)
    app = wait_until(lambda: next((app for app in node.apps.values() if app.running), None))
    assert app is not None
    app.release.set()
    again = call(controller, "hello/hold", "k1")
    assert again.status_code == 200
    assert again.headers["idempotent-replayed"] == "true"
    assert app.cancelled == []
    assert runs(node) == 1


def _repeats(controllers: list[ControllerProcess], key: str, done: threading.Event) -> list[httpx.Response]:
    """Sends the call again and again until it is done, as a client does that is in doubt."""
    answers = []
    for number in itertools.count():
        with contextlib.suppress(httpx.HTTPError):
            url = controllers[number % len(controllers)].url
            answers.append(httpx.post(f"{url}/fn/hello/hold", headers={"idempotency-key": key}, timeout=2.5))
        if done.is_set():
            return answers
    raise AssertionError("unreachable")


@pytest.mark.parametrize("paused", ["redis", "gateway"])
def test_a_pause_of_redis_or_of_the_gateway_begins_no_second_run(
    controller: ControllerProcess, node: HandNode, redis_server: RedisServer, tmp_path: Path, paused: str
) -> None:
    """Both stand still for 7 s, while others ask again with the key here and at another gateway."""
    controller.deploy("hello", concurrency=4)
    other = ControllerProcess(tmp_path / "other", redis_server.url).start()
    stopped = redis_server.process if paused == "redis" else controller.process
    asked = [other] if paused == "gateway" else [other, controller]
    assert stopped is not None
    try:
        with ThreadPoolExecutor(2) as pool:
            first, done = pool.submit(call, controller, "hello/hold", "k1"), threading.Event()
            app = wait_until(lambda: next((app for app in node.apps.values() if app.running), None))
            assert app is not None
            repeats = pool.submit(_repeats, asked, "k1", done)
            stopped.send_signal(signal.SIGSTOP)
            try:
                time.sleep(7)
            finally:
                stopped.send_signal(signal.SIGCONT)
            time.sleep(2)
            assert runs(node) == 1
            app.release.set()
            answered = first.result(20)
            done.set()
            assert answered.status_code == 200
            told = [answer for answer in repeats.result(20) if answer.status_code == 200]
        assert {answer.content for answer in told} <= {first.result().content}
        assert runs(node) == 1
        # Each of two gateways that answer names what it measured; the bill is that of the one whose row came first.
        (row,) = wait_until(lambda: other.rows("hello"), what="the row")
        assert str(row["billed_ms"]) in {answer.headers["fs-billed-ms"] for answer in (answered, *told)}
    finally:
        other.close()


def test_a_redis_that_refuses_writes_gives_no_call_of_a_living_gateway_to_another_one(
    controller: ControllerProcess, node: HandNode, redis_server: RedisServer, tmp_path: Path
) -> None:
    """No gateway can renew its claims then, and the first write after may be that of a call which waits."""
    controller.deploy("hello", concurrency=4)
    other = ControllerProcess(tmp_path / "other", redis_server.url).start()
    try:
        with ThreadPoolExecutor(2) as pool, redis_server.client() as client:
            first = pool.submit(call, controller, "hello/hold", "k1")
            app = wait_until(lambda: next((app for app in node.apps.values() if app.running), None))
            assert app is not None
            (name,) = client.scan_iter(keys.idempotency("?" * 64), count=1000)
            client.config_set("maxmemory", 1)
            client.pexpire(name, RUNNING_MS - 9_000)  # as if it had been so for 9 s
            waits = pool.submit(call, other, "hello/hold", "k1")
            time.sleep(KEPT_WATCHED_S + 1)
            client.config_set("maxmemory", 0)
            wait_until(lambda: client.pttl(name) > RUNNING_MS - 1_000, what="a renewal")
            claim = msgspec.json.decode(client.get(name), type=KeyClaim)
            app.release.set()
            answers = [first.result(20), waits.result(20)]
        assert not claim.retaken
        assert ["idempotent-replayed" in answer.headers for answer in answers] == [False, True]
        (row,) = wait_until(lambda: controller.rows("hello"))
        assert {answer.headers["fs-billed-ms"] for answer in answers} == {str(row["billed_ms"])}
    finally:
        other.close()


def test_a_claim_that_ends_under_a_call_that_runs_gives_its_answer_to_two_and_one_row(
    controller: ControllerProcess, node: HandNode, redis_server: RedisServer
) -> None:
    """A step of Redis' clock ends claims: a call that waited has the key then, and goes on with the one that runs."""
    controller.deploy("hello", concurrency=4)
    with ThreadPoolExecutor(2) as pool, redis_server.client() as client:
        first = pool.submit(call, controller, "hello/hold", "k1")
        app = wait_until(lambda: next((app for app in node.apps.values() if app.running), None))
        assert app is not None
        (name,) = client.scan_iter(keys.idempotency("?" * 64), count=1000)
        had = msgspec.json.decode(client.get(name), type=KeyClaim)
        waits = pool.submit(call, controller, "hello/hold", "k1")

        def taken() -> KeyClaim | None:
            raw = client.get(name)
            claim = msgspec.json.decode(raw, type=KeyClaim) if raw is not None else had
            if claim.owner != had.owner:
                return claim
            client.delete(name)
            return None

        wait_until(taken, what="a claim of the call that waited")
        left_ms = [client.pttl(name)]

        def renewed() -> bool:
            left_ms.append(client.pttl(name))
            return bool(left_ms[-1] > left_ms[-2])

        wait_until(renewed, what="the claim's renewal: the first call, which looks as often, has looked at it")
        app.release.set()
        answers = [first.result(20), waits.result(20)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].content == answers[1].content
    assert runs(node) == 1
    assert app.cancelled == []
    (row,) = wait_until(lambda: controller.rows("hello"))
    assert row["status"] == 200


def test_failures_and_refusals_are_not_kept(controller: ControllerProcess, node: HandNode) -> None:
    assert call(controller, "hello", "k1").status_code == 404
    controller.deploy("hello", timeout_s=1)
    assert call(controller, "hello/hold", "k2").status_code == 504
    app = wait_until(lambda: next(iter(node.apps.values()), None))
    assert app is not None
    app.release.set()
    assert call(controller, "hello/hold", "k2").status_code == 200
    assert call(controller, "hello", "k1").status_code == 200, "the key was freed by the 404"


def test_a_stream_is_kept_when_it_has_ended(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello")
    first = call(controller, "hello/stream", "k1")
    again = call(controller, "hello/stream", "k1")
    assert again.headers["content-type"].startswith("text/event-stream")
    assert again.content == first.content
    assert b"event: fleetstart" in again.content
    assert runs(node) == 1


def test_async_calls_have_keys_too(controller: ControllerProcess, node: HandNode, calls: Client) -> None:
    controller.deploy("hello")
    first = call(controller, "hello/echo", "k1", b"", **ASYNC)
    again = call(controller, "hello/echo", "k1", b"", **ASYNC)
    assert (first.status_code, again.status_code) == (202, 202)
    assert again.headers["location"] == first.headers["location"]
    assert again.headers["idempotent-replayed"] == "true"
    ended = calls.until(first.json()["id"], "succeeded")
    waited = call(controller, "hello/echo", "k1", prefer="respond-async, wait=10")
    assert waited.status_code == 200
    assert waited.json() == ended["result"]
    assert call(controller, "hello/echo", "k1", b"other", **ASYNC).status_code == 409
    assert call(controller, "nobody/echo", "k3", b"", **ASYNC).status_code == 404
    assert runs(node) == 1


def test_a_large_answer_lies_in_the_store_and_is_swept(
    controller: ControllerProcess, node: HandNode, redis_server: RedisServer
) -> None:
    controller.deploy("hello")
    long = "x" * 20_000
    first = call(controller, f"hello/echo?q={long}", "k1")
    assert len(first.content) > 20_000
    again = call(controller, f"hello/echo?q={long}", "k1")
    assert again.content == first.content
    assert runs(node) == 1
    kept: Path = controller.home / "store" / "idempotency"
    assert len([path for path in kept.rglob("*") if path.is_file()]) == 1
    with redis_server.client() as client:
        (name,) = client.zrange(keys.IDEMPOTENCY_KEPT, 0, -1)
        client.zadd(keys.IDEMPOTENCY_KEPT, {name: 1})
    wait_until(lambda: not [path for path in kept.rglob("*") if path.is_file()])


@pytest.mark.parametrize("key", ["", "x" * 256, "schlüssel"])
def test_a_key_that_is_none_is_refused(controller: ControllerProcess, key: str) -> None:
    controller.deploy("hello")
    answer = controller.http.post("/fn/hello", headers=[(b"idempotency-key", key.encode())])
    assert answer.status_code == 400
