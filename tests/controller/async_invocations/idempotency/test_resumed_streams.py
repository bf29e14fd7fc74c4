"""Streams with an idempotency key: gone on with at another gateway after the last event that the client has."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
import pytest
import redis

from fleetstart.client import Client
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.ledger import CLIENT_GONE, LOST_GATEWAY, InvocationRow, InvocationTrace
from fleetstart.runtime.contract.ids import FunctionName, InvocationId, Version
from fleetstart.runtime.contract.timeline import Timeline
from tests.controller.conftest import ControllerProcess, HandNode
from tests.servers import end, wait_until


@pytest.fixture
def second(redis_url: str, controller: ControllerProcess) -> Iterator[ControllerProcess]:
    other = ControllerProcess(controller.home.parent / "home2", redis_url, FS_STORE=str(controller.home / "store"))
    try:
        yield other.start()
    finally:
        other.close()


@dataclass
class Events:
    """Blocks of a stream as they come."""

    lines: Iterator[str]
    seen: list[str] = field(default_factory=list)

    def until(self, data: str) -> None:
        for line in self.lines:
            self.seen.append(line)
            if line == f"data: {data}":
                return
        raise AssertionError(f"{data} did not come: {self.seen}")

    def rest(self) -> list[str]:
        return [line for line in self.lines if line]


@contextmanager
def stream(
    controller: ControllerProcess, path: str, key: str, *, last: int = 0, body: bytes = b""
) -> Iterator[tuple[httpx.Response, Events]]:
    headers = {"idempotency-key": key, **({"last-event-id": str(last)} if last else {})}
    with controller.http.stream("POST", f"/fn/{path}", headers=headers, content=body) as answer:
        yield answer, Events(answer.iter_lines())


def ids(lines: list[str]) -> list[int]:
    return [int(line.removeprefix("id: ")) for line in lines if line.startswith("id: ")]


def test_a_killed_gateways_stream_goes_on_at_another_one_and_is_billed_once(
    controller: ControllerProcess, second: ControllerProcess, node: HandNode
) -> None:
    controller.deploy("hello")
    with stream(controller, "hello/gate", "k1") as (answer, events):
        events.until("first")
        invocation = answer.headers["x-request-id"]
        controller.kill()
        with pytest.raises(httpx.TransportError):
            events.rest()
    app = next(iter(node.apps.values()))
    assert app.running == 1, "the worker goes on"
    with stream(second, "hello/gate", "k1", last=1) as (answer, events):
        assert answer.headers["x-request-id"] == invocation
        app.release.set()
        rest = events.rest()
    assert "data: first" not in rest
    assert rest[:2] == ["id: 2", "data: second"]
    assert (ids(rest), rest[3]) == ([2, 3], "event: fleetstart")
    assert app.calls == [invocation], "it has run once"
    for last, left in ((0, [1, 2, 3]), (2, [3]), (3, [])):
        with stream(second, "hello/gate", "k1", last=last) as (answer, events):
            assert answer.headers["idempotent-replayed"] == "true"
            assert ids(events.rest()) == left
    controller.start()
    rows = wait_until(lambda: second.rows("hello"), what="its row")
    assert [(row["id"], row["status"]) for row in rows] == [(invocation, 200)]


@pytest.mark.parametrize(("status", "error"), [(502, LOST_GATEWAY), (499, CLIENT_GONE)])
def test_a_call_that_has_a_row_without_its_answer_is_gone_on_with_under_an_id_of_its_own(
    controller: ControllerProcess, second: ControllerProcess, node: HandNode, redis_url: str, status: int, error: str
) -> None:
    """Its row says 502, half a minute after its gateway was lost, or 499, if that found its key taken: who gets the
    answer then has another row."""
    controller.deploy("hello")
    with stream(controller, "hello/gate", "k1") as (answer, events):
        events.until("first")
        invocation = InvocationId(answer.headers["x-request-id"])
        controller.kill()
    row = InvocationRow(
        id=invocation, function=FunctionName("hello"), version=Version(1), status=status, error=error,
        accepted_unix_ms=1, queue_ms=0, billed_ms=0, memory_bytes=0, cost_nusd=0,
    )  # fmt: skip
    with redis.Redis.from_url(redis_url) as client:
        client.set(keys.trace(invocation), msgspec.json.encode(InvocationTrace(row=row, timeline=Timeline())))
        client.hdel(keys.OPEN, invocation)
    app = next(iter(node.apps.values()))
    with stream(second, "hello/gate", "k1", last=1) as (answer, events):
        own = answer.headers["x-request-id"]
        app.release.set()
        assert ids(events.rest()) == [2, 3]
    assert own != invocation
    assert app.calls == [invocation], "it has run once"
    rows = wait_until(lambda: second.rows("hello"), what="its row")
    assert [(row["id"], row["status"]) for row in rows] == [(own, 200)]


def test_a_stream_that_only_lost_its_client_is_answered_from_where_the_client_was(
    controller: ControllerProcess, node: HandNode
) -> None:
    controller.deploy("hello")
    with stream(controller, "hello/gate", "k1") as (_, events):
        events.until("first")
    next(iter(node.apps.values())).release.set()
    with stream(controller, "hello/gate", "k1", last=1) as (_, events):
        assert ids(events.rest()) == [2, 3]


def test_a_stream_whose_worker_is_lost_with_its_gateway_says_so_and_runs_again_from_its_start_alone(
    controller: ControllerProcess, second: ControllerProcess, node: HandNode, redis_url: str
) -> None:
    controller.deploy("hello")
    with stream(controller, "hello/gate", "k1") as (answer, events), redis.Redis.from_url(redis_url) as client:
        events.until("first")
        invocation = answer.headers["x-request-id"]
        gateway = wait_until(lambda: msgspec.json.decode(client.hget(keys.OPEN, invocation) or b"{}").get("gateway"))
        controller.kill()
    worker = next(iter(node.apps))
    node.end_server(worker)
    with stream(second, "hello/gate", "k1", last=1) as (answer, events):
        assert answer.status_code == 502
        assert "the worker that kept it" in "".join(events.rest())
        own = answer.headers["x-request-id"]
    assert own != invocation, "the first run's row is not for a gateway to write that knows nothing of it"
    (row,) = wait_until(lambda: second.rows("hello"))
    assert (row["id"], row["status"], row["error"]) == (own, 502, "worker_lost")
    with redis.Redis.from_url(redis_url) as client:
        (left,) = client.hgetall(keys.OPEN).items()
        assert left[0].decode() == invocation
        assert msgspec.json.decode(left[1])["gateway"] == gateway
    with stream(second, "hello/gate", "k1", last=1) as (answer, events):
        assert (answer.status_code, "events_gone" in "".join(events.rest())) == (410, True)
    with stream(second, "hello/gate", "k1", last=1, body=b"other") as (answer, _):
        assert answer.status_code == 410


def test_numbers_go_on_where_a_model_stream_moves_to_another_worker(
    controller: ControllerProcess, node: HandNode
) -> None:
    controller.deploy("hello")
    with stream(controller, "hello/marked?each=5", "k1", body=b"count") as (_, events):
        first = events.rest()
    assert ids(first) == list(range(1, 13)), "ten numbers, [DONE] and the bill"
    data = [line for line in first if line.startswith("data: ")]
    assert data[:11] == [*(f"data: {number}" for number in range(10)), "data: [DONE]"]
    assert not [line for line in first if "fs-mark" in line]
    with stream(controller, "hello/marked?each=5", "k1", last=7, body=b"count") as (_, events):
        assert events.rest() == first[first.index("id: 8") :]


def test_a_client_cannot_attach_to_a_call_of_another(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello", concurrency=2)
    refused = controller.http.post("/fn/hello/gate", headers={"idempotency-key": "k", "last-event-id": "1-2"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_input")
    with stream(controller, "hello/gate", "k1") as (answer, events):
        events.until("first")
        headers = {"fs-stream": "attach", "x-request-id": answer.headers["x-request-id"]}
        stranger = controller.http.post("/fn/hello/echo", headers=headers)
        assert stranger.json()["path"] == "/echo"
        next(iter(node.apps.values())).release.set()


STREAMS = 60
KILLS = 6


def test_sixty_streams_are_whole_over_kills_of_two_controllers(
    controller: ControllerProcess, second: ControllerProcess, node: HandNode
) -> None:
    """The client goes on with each by itself. Each is the golden text, has run once and has one row."""
    controller.deploy("hello", concurrency=STREAMS, scale={"max": 1})
    assert controller.http.get("/fn/hello").status_code == 200
    golden = list(range(100))
    with Client(controller.url, "") as one, Client(second.url, "") as other, ThreadPoolExecutor(STREAMS) as pool:

        def read(number: int) -> list[int]:
            function = (one, other)[number % 2].function("hello", path="/paced?100", method="POST")
            return list(function.with_options(idempotency_key=f"stream-{number}").stream())

        pending = [pool.submit(read, number) for number in range(STREAMS)]
        app = next(iter(node.apps.values()))
        wait_until(lambda: app.running > STREAMS // 2, 20, what="streams under way")
        for number in range(KILLS):
            victim = (controller, second)[number % 2]
            victim.kill()
            victim.start()
        texts = [stream.result(100) for stream in pending]
    assert texts == [golden] * STREAMS
    assert len(app.calls) == STREAMS + 1, "none has run twice"
    wait_until(lambda: len(second.rows("hello")) > STREAMS, 20, what="all rows")
    rows = second.rows("hello")
    assert sorted(row["id"] for row in rows) == sorted(app.calls)
    assert {row["status"] for row in rows} == {200}


def test_a_rolling_restart_fails_no_call_and_no_stream(redis_url: str, tmp_path: Path, node: HandNode) -> None:
    """Calls go on while one controller after the other is stopped and started; streams outlive the time to drain."""
    env = {"FS_STORE": str(tmp_path / "store"), "FS_DRAIN_S": "1"}
    pair = [ControllerProcess(tmp_path / f"home{number}", redis_url, **env) for number in range(2)]
    try:
        for controller in pair:
            controller.start()
        pair[0].deploy("hello", concurrency=64, scale={"max": 1})
        done = threading.Event()
        with Client(pair[0].url, "") as one, Client(pair[1].url, "") as other, ThreadPoolExecutor(8) as pool:
            clients = (one, other)

            def call(number: int) -> int:
                """Plain calls, one after the other; returns their number."""
                echo = clients[number % 2].function("hello", path="/echo", timeout_s=60)
                calls = 0
                while not done.is_set():
                    assert echo.call({"number": calls})["path"] == "/echo"
                    calls += 1
                return calls

            def read(number: int) -> list[int]:
                paced = clients[number % 2].function("hello", path="/paced?300", method="POST", timeout_s=60)
                return list(paced.with_options(idempotency_key=f"rolling-{number}").stream())

            assert pair[0].http.get("/fn/hello").status_code == 200
            calling = [pool.submit(call, number) for number in range(4)]
            reading = [pool.submit(read, number) for number in range(4)]
            app = next(iter(node.apps.values()))
            wait_until(lambda: app.running >= 4, 20, what="streams under way")
            for controller in pair:
                assert controller.process is not None
                end(controller.process, grace_s=20)
                controller.start()
            texts = [stream.result(60) for stream in reading]
            done.set()
            assert min(one.result(60) for one in calling) > 0
        assert texts == [list(range(300))] * 4
        assert {row["status"] for row in pair[0].rows("hello")} == {200}
    finally:
        for controller in pair:
            controller.close()
