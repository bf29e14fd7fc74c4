"""Overload: which calls wait, which are rejected, and with what errors. Through a real controller."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from fleetstart.runtime.contract.node.orders import WorkerOrder
from fleetstart.runtime.contract.node.reports import SegmentReport
from fleetstart.runtime.contract.sizes import MIB
from tests.controller.api.test_app import CHECKPOINT, PART, manifest, put
from tests.controller.conftest import ControllerProcess, HandNode
from tests.controller.worker_app import WorkerApp
from tests.servers import wait_until

ONE = {"scale": {"max": 1}, "concurrency": 1}


@contextmanager
def held(controller: ControllerProcess, node: HandNode, calls: int = 1, path: str = "/fn/f") -> Iterator[WorkerApp]:
    """So many calls under way until the block is left; they must have ended well then."""
    with ThreadPoolExecutor(calls) as pool:
        running: list[Future[httpx.Response]] = []
        app: WorkerApp | None = None
        try:
            running = [pool.submit(controller.http.get, f"{path}/hold") for _ in range(calls)]
            wait_until(lambda: sum(app.running for app in node.apps.values()) >= 1, what="a call on a worker")
            app = next(iter(node.apps.values()))
            yield app
        finally:
            for one in node.apps.values():
                one.release.set()
        assert [one.result().status_code for one in running] == [200] * calls


def error_of(answer: httpx.Response) -> dict[str, Any]:
    return dict(answer.json()["error"])


def test_a_call_that_is_not_to_wait_is_refused_at_once_and_wakes_the_function(
    controller: ControllerProcess, node: HandNode
) -> None:
    controller.deploy("f")
    answer = controller.http.get("/fn/f", headers={"fs-queue-timeout-s": "0"})
    assert (answer.status_code, error_of(answer)["code"]) == (503, "overloaded")
    assert int(answer.headers["retry-after"]) >= 1
    assert int(answer.headers["retry-after-ms"]) >= 50
    assert "no worker is free" in error_of(answer)["message"]
    assert error_of(answer)["wait"]["coming"], "the planner's prediction"
    wait_until(lambda: node.apps, what="a worker all the same")
    wait_until(lambda: controller.http.get("/fn/f", headers={"fs-queue-timeout-s": "0"}).status_code == 200)
    rows = wait_until(lambda: controller.rows("f"))
    assert [row["status"] for row in rows] == [200], "who was refused at the door is in no book"


def test_the_queue_deadline_ends_the_wait(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("f", **ONE, queue_timeout_s=20)
    with held(controller, node):
        answer = controller.http.get("/fn/f", headers={"fs-queue-timeout-s": "0.1", "x-request-id": "waited"})
        assert (answer.status_code, error_of(answer)["code"]) == (503, "queue_timeout")
        assert "within its queue timeout of 0.1 s" in error_of(answer)["message"]
        assert int(answer.headers["retry-after"]) >= 1
        row = wait_until(lambda: controller.rows("f"))[0]
        assert (row["request_id"], row["status"], row["billed_ms"]) == ("waited", 503, 0)
    assert controller.http.get("/fn/f").status_code == 200


def test_a_queue_deadline_without_end_is_that_of_the_call(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("f")
    for asked in ("inf", "1e300"):
        assert controller.http.get("/fn/f", headers={"fs-queue-timeout-s": asked}).status_code == 200


def test_the_functions_own_queue_deadline_is_the_longest(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("f", **ONE, queue_timeout_s=0.1)
    node.answer = lambda node, order: node.say(order, "starting")
    for asked in ({}, {"fs-queue-timeout-s": "50"}, {"fs-queue-timeout-s": "soon"}, {"fs-queue-timeout-s": "-1"}):
        answer = controller.http.get("/fn/f", headers=asked)
        assert (answer.status_code, error_of(answer)["code"]) == (503, "queue_timeout"), asked


def test_a_call_whose_turn_would_come_too_late_is_refused_at_once(
    controller: ControllerProcess, node: HandNode
) -> None:
    controller.deploy("f", **ONE)
    for _ in range(3):
        assert controller.http.get("/fn/f/sleep?s=0.3").status_code == 200
    with held(controller, node, calls=4):
        wait_until(lambda: controller.http.get("/api/v1/functions/f").json()["queued"] == 3)
        answer = controller.http.get("/fn/f", headers={"fs-queue-timeout-s": "0.5"})
        error = error_of(answer)
        assert (answer.status_code, error["code"]) == (429, "queue_full"), "its one worker is all that it may have"
        assert "raise `scale.max`" in error["hint"]
        assert (error["wait"]["queued"], error["wait"]["slots"], error["wait"]["running"]) == (3, 1, 1)
        assert error["wait"]["call_s"] == pytest.approx(0.3, abs=0.1)
        assert error["retry_after_s"] == error["wait"]["seconds"] > 0.5
        late = controller.http.get("/fn/f", headers={"fs-timeout-s": "0.9"})
        assert late.status_code == 429, "its deadline could not be kept"
        assert len(node.ordered()) == 1


def test_a_function_that_may_grow_is_our_lack_and_not_its_own(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("f", scale={"max": 2}, concurrency=1)
    assert controller.http.get("/fn/f/sleep?s=0.2").status_code == 200
    node.answer = lambda node, order: node.say(order, "starting")
    with held(controller, node):
        answer = controller.http.get("/fn/f", headers={"fs-queue-timeout-s": "0"})
        assert (answer.status_code, error_of(answer)["code"]) == (503, "overloaded")
        wait_until(lambda: len(node.ordered()) == 2, what="the refused call is demand")


def test_a_load_under_way_is_told_from_its_own_progress(controller: ControllerProcess, node: HandNode) -> None:
    """200 bytes a second of 4096: nobody could know that before the node has told twice how far it is."""
    begun_s: list[float] = []

    def start(node: HandNode, order: WorkerOrder) -> None:
        begun_s.append(time.time())
        node.say(order, "starting", start="cold")

    def segments() -> list[SegmentReport]:
        if not begun_s:
            return []
        ready_bytes = min(4000, round((time.time() - begun_s[0]) * 200))
        return [SegmentReport(CHECKPOINT, "filling", 4096, ready_bytes, [], time.time_ns())]

    def told() -> httpx.Response | None:
        answer = controller.http.get("/fn/f", headers={"fs-queue-timeout-s": "0"})
        coming = error_of(answer)["wait"].get("coming", [])
        return answer if coming and 0 < coming[0].get("bytes_per_s", 0) < 1000 else None

    node.answer, node.segments = start, segments
    publish_checkpoint(controller)
    controller.deploy("f", weights=CHECKPOINT)
    answer = wait_until(told, what="a rate that was seen")
    assert answer is not None
    left_s = begun_s[0] + 4096 / 200 - time.time()
    assert answer.status_code == 503
    assert abs(error_of(answer)["retry_after_s"] - left_s) < 0.3 * left_s
    assert abs(int(answer.headers["retry-after"]) - left_s) < 0.3 * left_s + 1
    (worker,) = error_of(answer)["wait"]["coming"]
    assert worker["weight_bytes"] == 4096
    assert 0 < worker["fetched_bytes"] < 4096
    assert "of its weights here" in error_of(answer)["message"]


def publish_checkpoint(controller: ControllerProcess) -> None:
    put(controller, f"checkpoints/{CHECKPOINT}/part-0", PART).raise_for_status()
    put(controller, f"checkpoints/{CHECKPOINT}/manifest.json", manifest()).raise_for_status()


# ── the function's own limits ──────────────────────────────────────────────────────────────────────


def test_a_rate_lets_a_burst_pass_and_tells_when_the_next_may_come(
    controller: ControllerProcess, node: HandNode
) -> None:
    controller.deploy("f", limits={"rate": 0.02, "burst": 2})
    assert [controller.http.get("/fn/f").status_code for _ in range(2)] == [200, 200]
    answer = controller.http.get("/fn/f")
    assert (answer.status_code, error_of(answer)["code"]) == (429, "rate_limited")
    assert 30 < int(answer.headers["retry-after"]) <= 50
    assert "0.02 calls a second" in error_of(answer)["message"]
    info = controller.http.get("/api/v1/functions/f").json()
    assert info["limits"] == {"rate": 0.02, "burst": 2, "concurrent": 0}
    controller.http.put("/api/v1/functions/f/scale", json={"rate": 0}).raise_for_status()
    wait_until(lambda: controller.http.get("/fn/f").status_code == 200, what="no limit any more")
    assert controller.http.put("/api/v1/functions/f/scale", json={"rate": -1}).status_code == 400
    controller.http.put("/api/v1/functions/f/scale", json=None).raise_for_status()


def test_calls_at_a_time_are_limited_with_those_that_wait(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("f", concurrency=4, limits={"concurrent": 2})
    with held(controller, node, calls=2):
        wait_until(lambda: sum(app.running for app in node.apps.values()) == 2)
        answer = controller.http.get("/fn/f")
        assert (answer.status_code, error_of(answer)["code"]) == (429, "rate_limited")
        assert "2 calls are under way" in error_of(answer)["message"]
        assert controller.http.post("/fn/f@1", content=b"x").status_code == 429, "whichever version"
    assert controller.http.get("/fn/f").status_code == 200
    assert controller.http.get("/fn/f").status_code == 200


def test_two_gateways_share_a_limit(controller: ControllerProcess, node: HandNode, redis_url: str) -> None:
    controller.deploy("f", limits={"rate": 0.02, "burst": 4})
    other = ControllerProcess(controller.home.parent / "other", redis_url)
    try:
        other.start()
        wait_until(lambda: other.http.get("/fn/f").status_code == 200)
        wait_until(lambda: len(gateways(node)) == 2)
        passed = [door.http.get("/fn/f").status_code for door in (controller, other) for _ in range(6)]
        assert 2 <= passed.count(200) <= 4
    finally:
        other.close()


def gateways(node: HandNode) -> list[Any]:
    return list(node.client.scan_iter("fs:gateway:*"))


def test_a_functions_own_limit_on_bodies_is_below_the_gateways(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("f", max_body_bytes=MIB)
    assert controller.http.post("/fn/f", content=bytes(MIB)).json()["size"] == MIB
    for body in (bytes(MIB + 1), iter([bytes(MIB), b"x"])):
        answer = controller.http.post("/fn/f", content=body)
        assert answer.status_code == 413
        assert "max_body" in error_of(answer)["hint"]
    controller.deploy("f", max_body_bytes=64 * MIB)
    assert controller.http.post("/fn/f", content=bytes(4 * MIB + 1)).status_code == 413, "the gateway's holds, too"
