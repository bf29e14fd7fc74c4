"""WebSockets that the gateway ends, at a real controller with an idle timeout of a second and small messages."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from fleetstart.runtime.contract.node.orders import WorkerOrder
from fleetstart.runtime.contract.timeline import Timeline
from fleetstart.runtime.contract.worker_headers import SOCKET_LATE
from tests.controller.conftest import ControllerProcess, HandNode
from tests.servers import AppServer, wait_until

MESSAGE_MAX_BYTES = 100_000
PROGRAM = """
import runpy
from fleetstart.controller.gateway import websocket_session
websocket_session.IDLE_S = 1.0
runpy.run_module("fleetstart.controller", run_name="__main__")
"""


class Impatient(ControllerProcess):
    command = (sys.executable, "-c", PROGRAM)


@pytest.fixture
def impatient(redis_url: str, tmp_path: Path) -> Iterator[ControllerProcess]:
    process = Impatient(tmp_path / "home", redis_url, FS_MAX_BODY=str(MESSAGE_MAX_BYTES))
    try:
        yield process.start()
    finally:
        process.close()


class Echo:
    """A worker that gives back what it hears, or as many bytes as it is asked for, until it is told to say that the
    time is up."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        await receive()
        if scope["path"] == "/no-app":
            head = [(b"fs-error", b"invalid_input"), (b"content-length", b"0")]
            await send({"type": "websocket.http.response.start", "status": 400, "headers": head})
            await send({"type": "websocket.http.response.body", "body": b""})
            return
        accepted = [(b"x-app", b"1"), (b"set-cookie", b"a=1"), (b"set-cookie", b"b=2"), (b"fs-version", b"77")]
        await send({"type": "websocket.accept", "headers": accepted})
        while (message := await receive())["type"] == "websocket.receive":
            if message["text"] == "late":
                await send({"type": "websocket.close", "code": SOCKET_LATE[0], "reason": SOCKET_LATE[1]})
                return
            text = message["text"]
            await send({"type": "websocket.send", "text": "x" * int(text) if text.isdecimal() else text})
        self.heard.append(message)


@pytest.fixture
def echo(impatient: ControllerProcess, node: HandNode) -> Echo:
    """Deployed under this name."""
    app = Echo()

    def answer(node: HandNode, order: WorkerOrder) -> None:
        if order.wanted == "drain":
            node.say(order, "gone")
            return
        server = node.servers[order.worker] = AppServer(app, log_level="critical", ws="websockets-sansio").start()
        node.say(order, "ready", endpoint=f"127.0.0.1:{server.port}", token="t", start="warm", timeline=Timeline())

    node.answer = answer
    impatient.deploy("echo")
    return app


def ended_by(controller: ControllerProcess, *texts: str | list[str]) -> tuple[int, str]:
    """The end of a WebSocket on which these texts are sent, each list in fragments, and each after the answer to the
    one before: an app that is about to send when the socket ends hears of it by its send alone. Pings are no messages:
    they do not end its idle time."""
    url = controller.url.replace("http://", "ws://") + "/fn/echo"
    with connect(url, proxy=None, ping_interval=0.1, additional_headers={"fs-timeout-s": "30"}) as socket:
        for text in texts[:-1]:
            socket.send(text)
            socket.recv(timeout=20)
        with contextlib.suppress(ConnectionClosed):  # the end can come before its last fragment
            socket.send(texts[-1])
        with pytest.raises(ConnectionClosed) as closed:
            [socket.recv(timeout=20) for _ in ("its answer", "its end")]
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code, closed.value.rcvd.reason


def test_a_socket_on_which_nobody_speaks_is_closed_and_billed(impatient: ControllerProcess, echo: Echo) -> None:
    assert ended_by(impatient, "hello") == (1001, "silent for 1 s")
    wait_until(lambda: echo.heard, what="word to the worker")
    assert echo.heard[0]["code"] == 1001
    (row,) = wait_until(lambda: impatient.rows("echo"), what="its row") or [{}]
    assert (row["status"], row["error"]) == (101, "idle")
    assert row["billed_ms"] >= 1000, "its worker was taken all the while"


def test_a_deadline_is_told_alike_whoever_comes_to_it_first(impatient: ControllerProcess, echo: Echo) -> None:
    assert ended_by(impatient, "late") == (1008, "open for the 30 s that it may be")
    (row,) = wait_until(lambda: impatient.rows("echo"), what="its row") or [{}]
    assert (row["status"], row["error"]) == (101, "deadline_exceeded")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("x" * 5_000_000, "frame with 5000000 bytes exceeds limit of 100000 bytes"),
        (["x" * 60_000] * 20, "frame with 60000 bytes after reading 60000 bytes exceeds limit of 100000 bytes"),
        ("100001", "a message has more than 100000 bytes"),
    ],
)
def test_a_message_that_is_too_large_in_either_direction_ends_with_a_code_and_a_reason(
    impatient: ControllerProcess, echo: Echo, message: str | list[str], reason: str
) -> None:
    """Its sender is still writing then, and reads it all the same."""
    assert ended_by(impatient, "100000", message) == (1009, reason)
    wait_until(lambda: echo.heard, what="word to the worker")
    assert echo.heard[0]["code"] == 1009
    (row,) = wait_until(lambda: impatient.rows("echo"), what="its row") or [{}]
    assert (row["status"], row["error"]) == (101, "too_large")


def test_the_headers_with_which_an_app_accepts_reach_the_client(impatient: ControllerProcess, echo: Echo) -> None:
    url = impatient.url.replace("http://", "ws://") + "/fn/echo"
    with connect(url, proxy=None) as socket:
        assert socket.response is not None
        headers = socket.response.headers
    assert (headers["x-app"], headers["fs-version"]) == ("1", "1")
    assert headers.get_all("set-cookie") == ["a=1; Path=/fn/echo", "b=2; Path=/fn/echo"]
    assert len(headers.get_all("sec-websocket-accept")) == 1


def test_a_function_that_is_no_app_says_that_it_takes_no_sockets(impatient: ControllerProcess, echo: Echo) -> None:
    with pytest.raises(InvalidStatus) as refused:
        connect(impatient.url.replace("http://", "ws://") + "/fn/echo/no-app", proxy=None)
    assert b"function echo does not accept WebSockets" in refused.value.response.body
