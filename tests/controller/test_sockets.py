"""A WebSocket on which nobody says anything any more, at a real controller that waits a second instead of minutes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from fleetstart.runtime.contract.orders import WorkerOrder
from fleetstart.runtime.contract.timeline import Timeline
from tests.controller.conftest import ControllerProcess, HandNode
from tests.servers import AppServer, wait_until

PROGRAM = """
import runpy
from fleetstart.controller import open_socket
open_socket.IDLE_S = 1.0
runpy.run_module("fleetstart.controller", run_name="__main__")
"""


class Impatient(ControllerProcess):
    def command(self) -> list[str]:
        return [sys.executable, "-c", PROGRAM]


@pytest.fixture
def impatient(redis_url: str, tmp_path: Path) -> Iterator[ControllerProcess]:
    process = Impatient(tmp_path / "home", redis_url)
    try:
        yield process.start()
    finally:
        process.close()


class Echo:
    """A worker that gives back what it hears."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": message["text"]})
        self.heard.append(message)


def test_a_socket_on_which_nobody_speaks_is_closed_and_billed(impatient: ControllerProcess, node: HandNode) -> None:
    app = Echo()

    def answer(node: HandNode, order: WorkerOrder) -> None:
        if order.wanted == "drain":
            node.say(order, "gone")
            return
        server = node.servers[order.worker] = AppServer(app, log_level="critical", ws="websockets-sansio").start()
        node.say(order, "ready", endpoint=f"127.0.0.1:{server.port}", token="t", start="warm", timeline=Timeline())

    node.answer = answer
    impatient.deploy("echo")
    url = impatient.url.replace("http://", "ws://") + "/fn/echo"
    # Pings say nothing: they keep the connection, not the conversation.
    with connect(url, proxy=None, ping_interval=0.1) as socket:
        socket.send("hello")
        assert socket.recv(timeout=10) == "hello"
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=20)
    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1001, "silent for 1 s")
    wait_until(lambda: app.heard, what="word to the worker")
    assert app.heard[0]["code"] == 1001
    (row,) = wait_until(lambda: impatient.rows("echo"), what="its row") or [{}]
    assert (row["status"], row["error"]) == (101, "idle")
    assert row["billed_ms"] >= 1000, "its worker was taken all the while"
