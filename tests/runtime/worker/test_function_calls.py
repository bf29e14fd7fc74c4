"""Calls of other functions by a real worker, whose gateway is the test: it opens the links and answers on them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from fleetstart.runtime.contract.function_calls import BROKEN, COMPLETE, CallRequest
from fleetstart.runtime.contract.node import exit_codes
from fleetstart.runtime.contract.worker_headers import (
    GRANT_HEADER,
    LINK_HEADER,
    LINK_LIMIT_HEADER,
    TOKEN_HEADER,
    AnswerHead,
)
from tests.runtime.workers import TOKEN, ForkServerProcess, Functions, Worker
from tests.stopwatch import Stopwatch

CALLER = """
from fleetstart.runtime import FleetError, call
def f(text: str):
    try:
        return [call("embed", text=text), call.with_options(path="/v1?x=1", method="PUT")("embed@3", b"raw")]
    except FleetError as error:
        return [type(error).__name__, error.message]
"""
CALLS: dict[str, Any] = {"calls": ["embed"], "memory_bytes": 64 << 20}
JSON = [("content-type", "application/json")]
DRAIN_S = 0.9
"""Shorter than the time in which a drained worker waits for slow readers of its last bytes."""


def link(worker: Worker, *, token: str = TOKEN, **headers: str) -> ClientConnection:
    headers = {TOKEN_HEADER: token, LINK_HEADER: "gw-1", **headers}
    return connect(worker.url.replace("http", "ws"), additional_headers=headers, proxy=None)


def answer(worker: Worker, *, status: int = 200, code: int = COMPLETE, times: int = 1) -> list[Any]:
    """Answers so many calls, each on a link of its own, and returns what was asked."""
    asked: list[Any] = []
    for _ in range(times):
        with link(worker) as gateway:
            request = msgspec.json.decode(gateway.recv(), type=CallRequest)
            asked.append((request, gateway.recv() if request.has_body else b""))
            gateway.send(msgspec.json.encode(AnswerHead(status=status, headers=JSON)).decode())
            gateway.send(b"4" if code == COMPLETE else b'{"half')
            gateway.close(code)
    return asked


def called(worker: Worker, **answering: Any) -> tuple[Any, list[Any]]:
    """Calls the function while its own calls are answered; the result, and what it asked."""
    asked: list[Any] = []
    gateway = threading.Thread(target=lambda: asked.extend(answer(worker, **answering)))
    gateway.start()
    try:
        return worker.post({"text": "four"}, headers={GRANT_HEADER: "gw-1:hush"}).json(), asked
    finally:
        gateway.join()


def test_a_worker_without_a_network_calls_over_the_links_of_its_gateway(functions: Functions) -> None:
    result, asked = called(functions.ready(CALLER, **CALLS), times=2)
    assert result == [4, 4]
    (first, body), (second, raw) = asked
    assert (first.grant, first.function, first.version, first.method, first.path) == (
        "hush", "embed", "live", "POST", "/",
    )  # fmt: skip
    assert (msgspec.json.decode(body), dict(first.headers)["content-type"]) == ({"text": "four"}, "application/json")
    assert (second.version, second.method, second.path, raw) == ("3", "PUT", "/v1?x=1", b"raw")


def test_a_plain_process_calls_as_a_confined_one_does(plain_server: ForkServerProcess, tmp_path: Path) -> None:
    worker = Functions(plain_server, tmp_path).ready(CALLER, **CALLS)
    assert "net" not in worker.isolation.split(",")
    assert called(worker, times=2)[0] == [4, 4]


def test_an_answer_that_breaks_off_is_a_lost_worker(functions: Functions) -> None:
    result, _ = called(functions.ready(CALLER, **CALLS), code=BROKEN)
    assert result == ["WorkerLost", "the answer of function embed broke off"]


def test_an_answer_of_the_callees_own_above_400_is_raised(functions: Functions) -> None:
    result, _ = called(functions.ready(CALLER, **CALLS), status=418)
    assert result == ["HandlerResponse", "function embed answered HTTP 418: 4"]


def test_an_input_above_its_gateways_limit_is_refused_before_it_is_sent(functions: Functions) -> None:
    worker = functions.ready(CALLER, **CALLS)
    results: list[Any] = []
    calling = threading.Thread(
        target=lambda: results.append(worker.post({"text": "x" * 4096}, headers={GRANT_HEADER: "gw-1:hush"}).json())
    )
    calling.start()
    with link(worker, **{LINK_LIMIT_HEADER: "4096"}) as gateway:
        assert msgspec.json.decode(gateway.recv(), type=CallRequest).has_body
        with pytest.raises(ConnectionClosed):
            gateway.recv()
    calling.join(10)
    assert results == [["TooLarge", "the input of function embed has more bytes than its gateway takes"]]


def test_only_a_gateway_opens_links_and_only_to_a_function_that_calls(functions: Functions) -> None:
    worker = functions.ready(CALLER, **CALLS)
    with pytest.raises(InvalidStatus, match="401"):
        link(worker, token="guessed")
    with pytest.raises(InvalidStatus, match="400"):
        link(functions.ready("def f(): ..."))


def test_an_idle_link_holds_no_slot_and_does_not_delay_the_end(functions: Functions) -> None:
    worker = functions.ready("def f() -> int: return 1", **CALLS)
    with link(worker) as gateway:
        assert worker.post().json() == 1
        watch = Stopwatch()
        worker.drain()
        assert worker.exit_status() == exit_codes.DRAINED
        assert watch.unhindered_s < DRAIN_S
        with pytest.raises(ConnectionClosed):
            gateway.recv()
