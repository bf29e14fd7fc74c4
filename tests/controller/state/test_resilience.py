"""kill -9 of Redis and of controllers, under calls; two controllers; fences; the ledger has each call once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from fleetstart.runtime.contract import redis_keys as keys
from tests.controller.conftest import ControllerProcess, HandNode
from tests.servers import NO_CERTIFICATES, RedisServer, wait_until


@pytest.fixture
def second(redis_url: str, controller: ControllerProcess) -> Iterator[ControllerProcess]:
    other = ControllerProcess(controller.home.parent / "home2", redis_url, FS_STORE=str(controller.home / "store"))
    try:
        yield other.start()
    finally:
        other.close()


def status(controller: ControllerProcess) -> dict[str, Any]:
    return dict(controller.http.get("/api/v1/status").json())


class Caller:
    """Calls one function again and again until told to stop; a refused or broken connection is tried again."""

    def __init__(self, urls: list[str], function: str) -> None:
        self.answers: list[int] = []
        self.ids: list[str] = []
        self._urls = urls
        self._function = function
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(3)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        with httpx.Client(timeout=20, verify=NO_CERTIFICATES) as http:
            count = 0
            while not self._stop.is_set():
                count += 1
                request_id = f"call-{number}-{count}"
                self.answers.append(self._until_answered(http, number, request_id))

    def _until_answered(self, http: httpx.Client, number: int, request_id: str) -> int:
        ends = time.monotonic() + 20
        while time.monotonic() < ends:
            try:
                url = self._urls[number % len(self._urls)]
                answer = http.get(f"{url}/fn/{self._function}", headers={"x-request-id": request_id})
                self.ids.append(answer.headers["x-request-id"])
                return answer.status_code
            except httpx.TransportError:
                number += 1  # what a client does: the next address
        return 0

    def more(self, count: int = 20) -> None:
        enough = len(self.answers) + count
        wait_until(lambda: len(self.answers) >= enough, 20, what="more answers")

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)


def test_redis_dies_under_calls_and_hot_functions_are_served(
    controller: ControllerProcess, node: HandNode, redis_server: RedisServer
) -> None:
    controller.deploy("hello", concurrency=4)
    controller.http.get("/fn/hello")
    caller = Caller([controller.url], "hello")
    caller.more()
    redis_server.kill()
    caller.more(100)
    refused = controller.http.get("/api/v1/invocations")
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "unavailable"
    redis_server.start()
    wait_until(lambda: status(controller)["redis"] == "ok", 3)
    caller.more()
    caller.stop()
    assert set(caller.answers) == {200}
    ids = set(caller.ids)
    wait_until(lambda: {row["id"] for row in _all_rows(redis_server)} >= ids, what="every call in the ledger")
    rows = [row["id"] for row in _all_rows(redis_server)]
    assert len(rows) == len(set(rows)), "each call once"
    controller.deploy("later")
    assert controller.http.get("/fn/later").status_code == 200


def _all_rows(redis_server: RedisServer) -> list[dict[str, Any]]:
    with redis_server.client() as client:
        entries: Any = client.xrange(keys.LEDGER)
        return [msgspec.json.decode(fields[b"row"]) for _, fields in entries]


def test_a_killed_controller_goes_on_where_it_was(
    controller: ControllerProcess, node: HandNode, redis_server: RedisServer
) -> None:
    controller.deploy("hello", concurrency=4)
    controller.http.get("/fn/hello")
    caller = Caller([controller.url], "hello")
    caller.more()
    controller.kill()
    controller.start()
    caller.more()
    caller.stop()
    assert set(caller.answers) == {200}
    assert len(node.ordered()) == 1, "the worker from before is used on"
    wait_until(lambda: {row["id"] for row in _all_rows(redis_server)} >= set(caller.ids))
    rows = [row["id"] for row in _all_rows(redis_server)]
    assert len(rows) == len(set(rows))
    controller.deploy("later")
    assert controller.http.get("/fn/later").status_code == 200, "it schedules again"


def states(controller: ControllerProcess, function: str) -> list[str]:
    return [worker["state"] for worker in controller.http.get(f"/api/v1/functions/{function}").json()["workers"]]


def test_the_other_controller_takes_over(
    controller: ControllerProcess, second: ControllerProcess, node: HandNode
) -> None:
    both = {status(c)["gateway"]: c for c in (controller, second)}
    leader = both[wait_until(lambda: (name := status(controller)["leader"]) in both and name, what="a leader")]
    other = second if leader is controller else controller
    other.deploy("hello")
    assert leader.http.get("/fn/hello").status_code == 200
    wait_until(lambda: "ready" in states(other, "hello"), what="word of the worker at the other controller")
    assert other.http.get("/fn/hello").headers["fs-start"] == "hot"
    leader.kill()
    other.deploy("later")
    assert other.http.get("/fn/later").status_code == 200
    assert status(other)["leader"] == status(other)["gateway"]


def test_a_call_at_one_controller_is_scheduled_by_the_other(
    controller: ControllerProcess, second: ControllerProcess, node: HandNode
) -> None:
    both = {status(c)["gateway"]: c for c in (controller, second)}
    leader = both[wait_until(lambda: (name := status(controller)["leader"]) in both and name, what="a leader")]
    follower = second if leader is controller else controller
    follower.deploy("hello", scale={"max": 2}, concurrency=1)
    with ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(lambda c: c.http.get("/fn/hello/sleep?s=0.2").status_code, [follower, leader, follower, leader])
        )
    assert answers == [200] * 4
    assert len(node.ordered()) <= 2
    assert all(app.most == 1 for app in node.apps.values())


def test_sigterm_lets_calls_end_and_writes_their_rows(
    controller: ControllerProcess, node: HandNode, redis_server: RedisServer
) -> None:
    controller.deploy("hello")
    controller.http.get("/fn/hello")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(controller.http.get, "/fn/hello/hold", headers={"x-request-id": "last"})
        app = next(iter(node.apps.values()))
        wait_until(lambda: len(app.calls) == 2)
        assert controller.process is not None
        controller.process.terminate()
        app.release.set()
        assert answer.result(10).status_code == 200
    assert controller.process.wait(10) == 0, controller.log()
    assert "last" in [row["request_id"] for row in _all_rows(redis_server)]
    with redis_server.client() as client:
        assert client.get(keys.LEADER) is None
        assert not client.exists(keys.OPEN)


@pytest.fixture
def impatient(redis_url: str, node: HandNode, tmp_path: Path) -> Iterator[ControllerProcess]:
    """A controller that drains for one second, with a ready worker of the function `hello`."""
    process = ControllerProcess(tmp_path / "impatient", redis_url, FS_DRAIN_S="1")
    try:
        process.start().deploy("hello")
        process.http.get("/fn/hello")
        yield process
    finally:
        process.close()


def _assert_ended_once(controller: ControllerProcess, redis_server: RedisServer, status: int) -> None:
    """The controller has exited with 0, and the call `last` has one row, unbilled, with the code `unavailable`."""
    assert controller.process is not None
    assert controller.process.wait(10) == 0, controller.log()
    ended = [row for row in _all_rows(redis_server) if row["request_id"] == "last"]
    assert [(row["status"], row["error"], row["cost_nusd"]) for row in ended] == [(status, "unavailable", 0)]
    with redis_server.client() as client:
        assert not client.exists(keys.OPEN)


def test_a_stream_that_outlives_the_drain_time_ends_with_an_error(
    impatient: ControllerProcess, redis_server: RedisServer
) -> None:
    with impatient.http.stream("GET", "/fn/hello/gate", headers={"x-request-id": "last"}) as response:
        pieces = response.iter_text()
        received = next(pieces)
        assert impatient.process is not None
        impatient.process.terminate()
        received += "".join(pieces)
    events = [line for line in received.splitlines() if line.startswith(("event: ", "data: first", "data: second"))]
    assert events == ["data: first", "event: error", "event: fleetstart"], received
    assert '"code":"unavailable"' in received
    _assert_ended_once(impatient, redis_server, status=200)


def test_a_call_that_outlives_the_drain_time_is_answered_unavailable(
    impatient: ControllerProcess, node: HandNode, redis_server: RedisServer
) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(impatient.http.get, "/fn/hello/hold", headers={"x-request-id": "last"})
        app = next(iter(node.apps.values()))
        wait_until(lambda: len(app.calls) == 2)
        assert impatient.process is not None
        impatient.process.terminate()
        assert answer.result(10).status_code == 503
    assert answer.result().json()["error"]["code"] == "unavailable"
    _assert_ended_once(impatient, redis_server, status=503)


def test_a_lost_node_is_replaced_by_another(
    controller: ControllerProcess, node: HandNode, redis_server: RedisServer, tmp_path: Path
) -> None:
    controller.deploy("hello")
    controller.http.get("/fn/hello")
    other = HandNode(redis_server, "node-2").start()
    try:
        node.close()
        answer = controller.http.get("/fn/hello")
        assert answer.status_code == 200
        assert len(other.ordered()) == 1
    finally:
        other.close()


def test_a_restarted_node_is_told_again(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello")
    controller.http.get("/fn/hello")
    first = node.ordered()[0]
    node.epoch = "e2"
    node.end_server(first.worker)
    node.say(first, "gone")
    assert controller.http.get("/fn/hello").status_code == 200
    assert node.ordered()[1].epoch in ("e1", "e2")
