"""Calls through a real controller whose workers break off, drain, are busy, or cannot start."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from fleetstart.runtime.contract.sizes import MIB
from tests.controller.conftest import ControllerProcess, HandNode
from tests.servers import wait_until
from tests.stopwatch import Stopwatch


@pytest.mark.parametrize(
    ("code", "error", "billed"),
    [
        ("", "handler_error", True),
        ("worker_lost", "worker_lost", True),
        ("out_of_memory", "worker_lost", True),
        ("checksum_mismatch", "worker_lost", False),
    ],
)
def test_a_stream_that_breaks_says_so_and_is_billed_unless_the_platform_broke_it(
    controller: ControllerProcess, node: HandNode, code: str, error: str, billed: bool
) -> None:
    """Its worker ends by itself, or lives on and has closed the connection: what came is paid for."""

    def fail(node: HandNode, order: Any) -> None:
        if order.wanted == "run":
            node.ready(order)
            threading.Thread(target=end, args=(node, order), daemon=True).start()

    def end(node: HandNode, order: Any) -> None:
        app = node.apps[order.worker]
        wait_until(lambda: (app.calls and not app.running) or node.closed, 100)
        if code and app.calls:
            node.fail(order, code, "it ended")

    node.answer = fail
    controller.deploy("hello")
    watch = Stopwatch()
    text = controller.http.get(f"/fn/hello/cut?{'dies' if code else ''}").text
    waited_for_cores_ms = (watch.elapsed_s - watch.unhindered_s) * 1e3
    [row] = wait_until(lambda: controller.rows("hello"))
    assert (row["billed_ms"] >= 20, row["cost_nusd"] > 0) == (billed, billed)
    assert row["billed_ms"] < 900 + waited_for_cores_ms, "until it broke, not until that was known"
    assert text.startswith("data: first\n\n")
    assert "event: error" in text
    assert error in text
    assert row["error"] == error
    assert "event: fleetstart" in text


def test_a_call_of_a_former_version_that_loses_its_only_worker_gets_another_one(
    controller: ControllerProcess, node: HandNode
) -> None:
    """Between two attempts it holds no slot and does not wait; its version is kept all the same."""

    def serve_first_until_called(node: HandNode, order: Any) -> None:
        if order.wanted == "run" and not node.apps:
            app = node.ready(order)
            threading.Thread(target=die_when_called, args=(node, order, app), daemon=True).start()
        else:
            node.serve(order)

    def die_when_called(node: HandNode, order: Any, app: Any) -> None:
        wait_until(lambda: app.calls or node.closed, 100)
        node.fail(order, "worker_lost", "it ended")

    node.answer = serve_first_until_called
    controller.deploy("hello", retries=1)
    controller.deploy("hello", retries=1, env={"NEXT": "1"})
    answer = controller.http.get("/fn/hello@1/drop?once", headers={"fs-timeout-s": "15"})
    assert answer.status_code == 200, answer.text
    # One more attempt, which no handler sees, if the worker's end is known late.
    assert answer.headers["fs-attempts"] in ("2", "3")
    assert answer.headers["fs-version"] == "1"


@pytest.mark.parametrize(("code", "retries", "attempts"), [
    ("worker_lost", 0, 1), ("worker_lost", 2, 3), ("out_of_memory", 2, 1),
])  # fmt: skip
def test_a_call_that_breaks_its_worker_runs_again_if_its_function_says_so(
    controller: ControllerProcess, node: HandNode, code: str, retries: int, attempts: int
) -> None:
    def drop(node: HandNode, order: Any) -> None:
        if order.wanted == "run":
            node.ready(order)
            threading.Thread(target=die_when_called, args=(node, order), daemon=True).start()

    def die_when_called(node: HandNode, order: Any) -> None:
        app = node.apps[order.worker]
        wait_until(lambda: app.calls or node.closed, 100)  # the last one is kept warm, and never called
        if app.calls:
            node.fail(order, code, "the worker passed its limit of 512 MiB")

    node.answer = drop
    controller.deploy("hello", retries=retries)
    answer = controller.http.get("/fn/hello/drop")
    assert answer.status_code == (500 if code == "out_of_memory" else 502)
    assert answer.json()["error"]["code"] == code
    assert "512 MiB" in answer.json()["error"]["message"]
    calls = [call for app in node.apps.values() for call in app.calls]
    assert len(calls) == attempts
    # One more for each worker whose end is known late: it refuses a call that no handler sees.
    assert attempts <= int(answer.headers["fs-attempts"]) <= attempts + retries
    assert ("retries=2" in answer.json()["error"]["hint"]) == (not retries)
    row = wait_until(lambda: controller.rows("hello"))[0]
    assert (row["status"], row["billed_ms"], row["attempts"]) == (answer.status_code, 0, attempts)


def test_a_call_that_met_a_drained_worker_goes_to_the_next(controller: ControllerProcess, node: HandNode) -> None:
    """The worker had ended all that it had begun, so the call cannot have been among it."""

    def drained(node: HandNode, order: Any) -> None:
        app = node.ready(order)
        if len(node.ordered()) == 1:
            threading.Thread(target=drain_when_called, args=(node, order, app), daemon=True).start()

    def drain_when_called(node: HandNode, order: Any, app: Any) -> None:
        wait_until(lambda: app.calls, 10)
        node.say(order, "gone", drained=True)

    node.answer = drained
    controller.deploy("hello")
    answer = controller.http.get("/fn/hello/drop?once")
    assert (answer.status_code, answer.headers["fs-attempts"]) == (200, "2")


def test_a_worker_that_died_is_replaced_and_the_call_succeeds(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello")
    controller.http.get("/fn/hello")
    first = node.ordered()[0]
    node.end_server(first.worker)  # nobody listens there any more, and nobody has told
    threading.Timer(0.3, node.say, args=(first, "failed")).start()
    assert controller.http.get("/fn/hello").status_code == 200
    assert len(node.ordered()) == 2


def test_a_draining_worker_hands_its_call_on(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello", scale={"max": 2})
    controller.http.get("/fn/hello")
    first = node.ordered()[0]
    node.apps[first.worker].draining = True
    threading.Timer(0.2, node.say, args=(first, "gone")).start()
    assert controller.http.get("/fn/hello").status_code == 200
    assert len(node.ordered()) == 2


def test_a_busy_worker_is_asked_again(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello", scale={"max": 1})
    controller.http.get("/fn/hello")
    app = next(iter(node.apps.values()))
    app.running += 1  # somebody else's call
    threading.Timer(0.3, lambda: setattr(app, "running", app.running - 1)).start()
    assert controller.http.get("/fn/hello").status_code == 200
    assert len(node.ordered()) == 1


def test_a_version_that_cannot_start_gives_its_own_error_and_stops_costing(
    controller: ControllerProcess, node: HandNode
) -> None:
    node.answer = lambda node, order: node.fail(order, "start_failed", "load() raised ValueError: no")
    controller.deploy("bad")
    answer = controller.http.get("/fn/bad")
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "start_failed"
    assert "load() raised" in answer.json()["error"]["message"]
    assert "fs logs bad" in answer.json()["error"]["hint"]
    assert len(node.ordered()) == 3
    assert controller.http.get("/fn/bad").status_code == 500
    assert len(node.ordered()) == 3, "a broken version is not started for every call"
    info = controller.http.get("/api/v1/functions/bad").json()
    assert info["broken"]["code"] == "start_failed"
    node.answer = HandNode.serve
    controller.deploy("bad")  # the same spec again: another chance
    assert controller.http.get("/fn/bad").status_code == 200


def test_what_only_the_user_can_mend_is_not_tried_again(controller: ControllerProcess, node: HandNode) -> None:
    node.answer = lambda node, order: node.fail(order, "syntax_error", "handler.py, line 3: invalid syntax")
    controller.deploy("bad")
    answer = controller.http.get("/fn/bad")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "syntax_error")
    assert len(node.ordered()) == 1


def test_a_function_that_fits_no_node_is_refused_with_figures(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("huge", memory_bytes=64 * 1024 * MIB)
    answer = controller.http.get("/fn/huge")
    assert answer.status_code == 503
    assert "65536 MiB" in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) >= 1
