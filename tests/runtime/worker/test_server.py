"""The door of a worker: its secret, its slots, its deadlines, its metering, and how it drains."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from fleetstart.runtime.contract.node import exit_codes
from fleetstart.runtime.contract.node.messages import Drained, Usage
from fleetstart.runtime.contract.worker_headers import (
    BUSY_HEADER,
    DEADLINE_HEADER,
    DRAINING_HEADER,
    ERROR_HEADER,
    TOKEN_HEADER,
)
from tests.runtime.workers import NO_HEADERS, Functions, Worker, until

GATES = """
    import asyncio, os, time

    def f(name: str):
        print(name, "began")
        while not os.path.exists("/tmp/" + name):
            time.sleep(0.002)
        return name

    async def g(name: str):
        print(name, "began")
        try:
            while not os.path.exists("/tmp/" + name):
                await asyncio.sleep(0.002)
        finally:
            print(name, "ended")
        return name

    async def h(name: str):
        for part in ("first", "second"):
            yield part
            while not os.path.exists("/tmp/" + name):
                await asyncio.sleep(0.002)

    async def blocks(name: str):
        print(name, "began")
        while True:
            pass
"""


def open_gate(worker: Worker, name: str) -> None:
    """Inside the worker's own /tmp."""
    with open(f"/proc/{worker.pid}/root/tmp/{name}", "w"):
        pass


@pytest.fixture(autouse=True)
def confined(functions: Functions) -> None:
    if not functions.server.warm.isolation:
        pytest.skip("the gates lie in a worker's own /tmp")


@pytest.fixture
def pool() -> Any:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def begin(worker: Worker, pool: ThreadPoolExecutor, name: str, headers: Mapping[str, str] = NO_HEADERS) -> Any:
    call = pool.submit(worker.post, {"name": name}, headers=headers)
    until(lambda: f"{name} began" in worker.log(), f"the start of {name}")
    return call


@pytest.mark.parametrize("token", ["", "wrong", "secret-of-the-tesT"])
def test_a_caller_without_the_workers_secret_is_turned_away(functions: Functions, token: str) -> None:
    worker = functions.ready("def f(): print('ran')\n")
    response = worker.post(headers={TOKEN_HEADER: token})
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "unauthorized"
    assert worker.log() == ""


@pytest.mark.parametrize("entry", ["f", "g"])
def test_as_many_calls_as_slots_run_and_the_next_is_told_that_it_is_busy(
    functions: Functions, pool: ThreadPoolExecutor, entry: str
) -> None:
    worker = functions.ready(GATES, entry, concurrency=2)
    calls = [begin(worker, pool, name) for name in ("a", "b")]
    refused = worker.post({"name": "c"})
    assert refused.status_code == 503
    assert refused.headers[BUSY_HEADER]
    assert DRAINING_HEADER not in refused.headers
    assert refused.headers[ERROR_HEADER] == "unavailable"
    for name in ("a", "b"):
        open_gate(worker, name)
    assert [call.result().json() for call in calls] == ["a", "b"]
    open_gate(worker, "c")
    assert worker.post({"name": "c"}).json() == "c"
    assert worker.log().count("c began") == 1


def test_a_drained_worker_finishes_its_calls_and_takes_no_more(functions: Functions, pool: ThreadPoolExecutor) -> None:
    worker = functions.ready(GATES, concurrency=3)
    calls = [begin(worker, pool, name) for name in ("a", "b")]
    with worker.client() as client:
        assert client.post("", content=b"{}").status_code == 400
        worker.drain()
        refused = until(lambda: _draining(client.post("", content=b"{}")), "the drain")
    assert refused.headers[DRAINING_HEADER]
    open_gate(worker, "a")
    assert calls[0].result().json() == "a"
    open_gate(worker, "b")
    assert calls[1].result().json() == "b"
    last = Usage(0, 0, 0)
    while isinstance(message := worker.receive(), Usage):
        last = message
    assert isinstance(message, Drained)
    assert last.running == 0
    assert last.calls == 3
    assert worker.exit_status() == exit_codes.DRAINED


def _draining(response: httpx.Response) -> httpx.Response | None:
    return response if response.status_code == 503 else None


@pytest.mark.slow
def test_a_drain_under_load_loses_no_call_that_was_taken(functions: Functions, pool: ThreadPoolExecutor) -> None:
    worker = functions.ready("import time\ndef f():\n    time.sleep(0.001)\n    return 'x' * 10_000\n", concurrency=4)
    stop = threading.Event()

    def load() -> list[int]:
        statuses: list[int] = []
        with worker.client() as client:
            while not stop.is_set():
                try:
                    statuses.append(client.get("").status_code)
                except httpx.TransportError:
                    break  # the worker has left: nothing was begun
        return statuses

    clients = [pool.submit(load) for _ in range(4)]
    worker.next_usage(lambda usage: usage.calls > 20)
    worker.drain()
    assert worker.exit_status() == exit_codes.DRAINED
    stop.set()
    statuses = [status for client in clients for status in client.result()]
    assert statuses.count(200) > 20
    assert set(statuses) <= {200, 503}


def test_a_drain_ends_after_its_grace_whatever_runs(functions: Functions, pool: ThreadPoolExecutor) -> None:
    worker = functions.ready(GATES)
    call = begin(worker, pool, "never")
    worker.drain(grace_s=0.05)
    assert worker.exit_status() == exit_codes.DRAINED
    with pytest.raises(httpx.TransportError):
        call.result()


def test_an_idle_worker_leaves_at_once(functions: Functions) -> None:
    worker = functions.ready(GATES)
    worker.drain()
    while isinstance(message := worker.receive(), Usage):
        pass
    assert isinstance(message, Drained)
    assert worker.exit_status() == exit_codes.DRAINED


def test_an_async_call_past_its_deadline_is_cancelled(functions: Functions) -> None:
    worker = functions.ready(GATES, "g")
    response = worker.post({"name": "late"}, headers={DEADLINE_HEADER: "100"})
    assert response.status_code == 504
    assert response.headers[ERROR_HEADER] == "deadline_exceeded"
    assert "late ended" in worker.log()
    open_gate(worker, "next")
    assert worker.post({"name": "next"}).json() == "next"


def test_a_stream_past_its_deadline_is_cut(functions: Functions) -> None:
    worker = functions.ready(GATES, "h")
    with pytest.raises(httpx.RemoteProtocolError):
        worker.post({"name": "never"}, headers={DEADLINE_HEADER: "100"})
    open_gate(worker, "next")
    assert "second" in worker.post({"name": "next"}).text


@pytest.mark.parametrize("entry", ["f", "blocks"])
def test_a_call_that_cannot_be_stopped_ends_its_worker_after_the_deadline(
    functions: Functions, pool: ThreadPoolExecutor, entry: str
) -> None:
    worker = functions.ready(GATES, entry)
    call = begin(worker, pool, "stuck", {DEADLINE_HEADER: "100"})
    assert worker.exit_status() == exit_codes.OVERRUN
    with pytest.raises(httpx.TransportError):
        call.result()
    assert "inv-test" in worker.log()
    assert "past its deadline" in worker.log()


def test_a_slow_thread_keeps_its_slot_past_the_deadline_until_it_ends(
    functions: Functions, pool: ThreadPoolExecutor
) -> None:
    worker = functions.ready(GATES)
    late = begin(worker, pool, "late", {DEADLINE_HEADER: "100"})
    worker.next_usage(lambda usage: usage.busy_ns > 200_000_000)
    assert worker.post({"name": "next"}).status_code == 503
    open_gate(worker, "late")
    assert late.result().status_code == 504
    open_gate(worker, "next")
    assert worker.post({"name": "next"}).status_code == 200


@pytest.mark.parametrize("deadline", ["", "soon", "nan", "inf"])
def test_a_deadline_that_is_not_a_number_is_none(functions: Functions, deadline: str) -> None:
    assert functions.ready("def f(): return 1\n").post(headers={DEADLINE_HEADER: deadline}).json() == 1


def test_usage_tells_of_busy_time_that_calls_share(functions: Functions, pool: ThreadPoolExecutor) -> None:
    worker = functions.ready(GATES, concurrency=2)
    started_ns = time.monotonic_ns()
    calls = [begin(worker, pool, name) for name in ("a", "b")]
    running = worker.next_usage(lambda usage: usage.running == 2)
    assert running.calls == 2
    for name, call in zip("ab", calls, strict=True):
        open_gate(worker, name)
        call.result()
    idle = worker.next_usage(lambda usage: usage.running == 0)
    assert running.busy_ns <= idle.busy_ns <= time.monotonic_ns() - started_ns
    assert idle.calls == 2


def test_connections_are_kept_alive(functions: Functions) -> None:
    worker = functions.ready("def f(): return 1\n")
    with worker.client() as client:
        ports = {client.get("").extensions["network_stream"].get_extra_info("client_addr")[1] for _ in range(3)}
    assert len(ports) == 1


def test_a_response_without_content_leaves_its_connection_in_order(functions: Functions) -> None:
    worker = functions.ready(
        "from fleetstart.runtime import Response\ndef f(status: int): return Response(None, status=status)\n"
    )
    with worker.client() as client:
        answers = [client.post("", json={"status": status}) for status in (204, 304, 200)]
    assert [(answer.status_code, answer.content) for answer in answers] == [(204, b""), (304, b""), (200, b"null")]
