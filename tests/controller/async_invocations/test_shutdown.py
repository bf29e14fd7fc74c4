"""Async calls of a controller that gets SIGTERM: what runs may end within the drain time, and is billed once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.controller.async_invocations.conftest import Client, Receiver
from tests.controller.conftest import ControllerProcess, HandNode
from tests.servers import wait_until

ControllerOf = Callable[..., ControllerProcess]


@pytest.fixture
def start(redis_url: str, tmp_path: Path) -> Iterator[ControllerOf]:
    """Starts a controller; all of a test have one store."""
    started: list[ControllerProcess] = []

    def start(drain_s: int = 1) -> ControllerProcess:
        home = tmp_path / f"home-{len(started)}"
        one = ControllerProcess(
            home, redis_url, FS_STORE=str(tmp_path / "store"), FS_DRAIN_S=str(drain_s), FS_WEBHOOK_ALLOW="127.0.0.0/8"
        )
        started.append(one)
        return one.start()

    try:
        yield start
    finally:
        for one in started:
            one.close()


def terminate(controller: ControllerProcess) -> None:
    assert controller.process is not None
    controller.http.close()  # connections that are kept alive end at once all the same
    controller.process.terminate()


def has_ended(controller: ControllerProcess) -> bool:
    return controller.process is not None and controller.process.poll() is not None


def whats(info: dict[str, list[dict[str, object]]]) -> list[object]:
    return [moment["what"] for moment in info["history"]]


def test_a_call_that_runs_may_end_and_no_other_is_begun(start: ControllerOf, node: HandNode) -> None:
    """The call was cut as soon as no client was connected, and its whole run came on top."""
    one = start(drain_s=20)
    one.deploy("hello", scale={"max": 1})
    running = Client(one).accepted("hello/hold")
    (app,) = wait_until(lambda: [app for app in node.apps.values() if app.running])
    waiting = Client(one).accepted("hello/echo")
    terminate(one)
    two = start()
    calls = Client(two)
    calls.until(waiting, "running")  # at the second one, where it waits for the worker
    assert not has_ended(one)
    app.release.set()
    wait_until(lambda: has_ended(one), what="the end of the controller whose call has ended")
    ended = calls.until(running, "succeeded")
    assert whats(ended) == ["accepted", "started", "succeeded"]
    calls.until(waiting, "succeeded")
    assert app.cancelled == []
    rows = wait_until(lambda: found if len(found := two.rows("hello")) == 2 else [])
    assert {row["id"]: row["status"] for row in rows} == {running: 200, waiting: 200}


def test_a_run_that_is_handed_over_costs_nothing(start: ControllerOf, node: HandNode) -> None:
    """The run was billed as one whose client had left, and the run after it too."""
    one = start()
    one.deploy("hello", concurrency=2)
    handed = Client(one).accepted("hello/hold", fs_queue_timeout_s="1")
    (app,) = wait_until(lambda: [app for app in node.apps.values() if app.running])
    two = start()
    began_unix_ms = Client(two).get(handed)["started_unix_ms"]
    wait_until(lambda: time.time() * 1000 > began_unix_ms + 1_000, what="it to have run for longer than it may wait")
    terminate(one)
    wait_until(lambda: app.cancelled == [handed], what="the worker to be told")
    wait_until(lambda: app.running, what="the run at the other controller")
    app.release.set()
    calls = Client(two)
    ended = calls.until(handed, "succeeded")
    assert whats(ended) == [
        "accepted", "started", "handed back by a gateway that shuts down", "started", "succeeded"
    ]  # fmt: skip
    rows = wait_until(lambda: found if len(found := two.rows("hello")) == 2 else [])
    by_id = {row["id"]: (row["status"], row["error"], row["billed_ms"] > 0) for row in rows}
    assert by_id == {handed: (503, "unavailable", False), f"{handed}.2": (200, "", True)}


def test_a_call_that_waits_for_a_worker_is_handed_over_at_once(start: ControllerOf, node: HandNode) -> None:
    node.answer = lambda node, order: None  # workers never come
    one = start(drain_s=20)
    one.deploy("hello")
    waiting = Client(one).accepted("hello/echo")
    Client(one).until(waiting, "running")
    wait_until(lambda: node.ordered(), what="a worker's order")
    terminate(one)
    wait_until(lambda: has_ended(one), 10, what="the controller's end, before its drain time is over")
    found = Client(start()).get(waiting)
    assert "handed back by a gateway that shuts down" in whats(found)


def test_webhooks_and_queue_timeouts_go_on_while_calls_may_end(
    start: ControllerOf, node: HandNode, hook: str, receiver: Receiver
) -> None:
    """Webhooks and timeouts of a single controller waited for the next one, after the whole drain time."""
    one = start(drain_s=20)
    one.deploy("hello", scale={"max": 1})
    running = Client(one).accepted("hello/hold", fs_webhook=hook)
    (app,) = wait_until(lambda: [app for app in node.apps.values() if app.running])
    waiting = Client(one).accepted("hello/echo", fs_webhook=hook, fs_queue_timeout_s="2")
    terminate(one)
    wait_until(lambda: told(receiver) == [("invocation.expired", waiting)], what="the webhook of the queue timeout")
    assert not has_ended(one)
    app.release.set()
    wait_until(lambda: has_ended(one), what="the end of the controller whose call has ended")
    assert told(receiver)[1:] == [("invocation.succeeded", running)]
    calls = Client(start())
    assert {calls.get(call)["delivery"]["state"] for call in (running, waiting)} == {"delivered"}
    assert [len(app.calls) for app in node.apps.values()] == [1]


def told(receiver: Receiver) -> list[tuple[str, str]]:
    """Types and calls of the webhooks that came."""
    bodies = [msgspec.json.decode(raw) for _, raw, _ in receiver.got]
    return [(body["type"], body["data"]["id"]) for body in bodies]
