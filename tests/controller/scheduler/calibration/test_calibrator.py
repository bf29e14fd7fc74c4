"""Learning over a real Redis: starts, answers and calls change the measures, once, whoever schedules."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetstart.controller.planner.estimates import NodeMeasures, VersionMeasures
from fleetstart.controller.planner.plan import Plan
from fleetstart.controller.scheduler.calibration.calibrator import Calibrator
from fleetstart.controller.state.records import VersionKey, read_measures
from fleetstart.controller.state.redis_client import connect
from fleetstart.controller.state.sync import StateSync
from fleetstart.controller.state.view import View
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import DeviceOutOfMemory
from fleetstart.runtime.contract.ids import FunctionName, NodeId, PipelineId, Version, WorkerId
from fleetstart.runtime.contract.node.devices import DeviceId, DeviceShare
from fleetstart.runtime.contract.node.orders import WorkerOrder, WorkerStatus
from fleetstart.runtime.contract.node.speed import Speed
from fleetstart.runtime.contract.process.moving_average import MovingAverage
from fleetstart.runtime.contract.timeline import Timeline, machine_origin_ns
from fleetstart.runtime.contract.weights.stage import Stage
from tests.controller.conftest import ControllerProcess, HandNode
from tests.controller.scheduler.calibration.test_observations import stage
from tests.controller.scheduler.test_autoscaler import spec
from tests.servers import RedisServer, wait_until

F = VersionKey(FunctionName("f"), Version(1))
MS = 1_000_000
Learned = Callable[[], tuple[dict[NodeId, NodeMeasures], dict[VersionKey, VersionMeasures]]]


def begins(node: HandNode, order: WorkerOrder) -> None:
    """20 ms to start, 30 ms of imports, 40 ms to build."""
    if order.wanted == "drain":
        node.say(order, "gone")
        return
    ordered_ns = order.ordered_unix_ns - machine_origin_ns()
    timeline = Timeline()
    timeline.add("start", ordered_ns, ordered_ns + 20 * MS)
    timeline.add("import", ordered_ns + 20 * MS, ordered_ns + 50 * MS)
    timeline.add("load", ordered_ns + 50 * MS, ordered_ns + 90 * MS)
    node.ready(order, timeline=timeline)


@pytest.fixture
def learned(redis_server: RedisServer) -> Iterator[Learned]:
    with redis_server.client() as client:
        yield lambda: read_measures(client.hgetall(keys.MEASURES))


def test_a_start_its_answer_and_calls_are_learned_and_outlive_the_scheduler(
    controller: ControllerProcess,
    node: HandNode,
    learned: Learned,
    redis_url: str,
    tmp_path: Path,
) -> None:
    node.answer = begins
    controller.deploy("f")
    assert controller.http.post("/fn/f", json={}).headers["fs-start"] == "warm"
    assert controller.http.post("/fn/f", json={}).headers["fs-start"] == "hot"

    def all_of_it() -> bool:
        nodes, versions = learned()
        return node.name in nodes and F in versions and versions[F].ttft_error.count > 0

    wait_until(all_of_it, what="measures of a start and its outcome")
    nodes, versions = learned()
    start_s, library_s = nodes[node.name].start_s, versions[F].library_s
    assert (start_s.value, start_s.count) == pytest.approx((0.02, 1))
    assert (library_s.value, library_s.count) == pytest.approx((0.07, 1))
    assert versions[F].ttft_error.count == 1, "the second call met a worker that was ready"

    node.speeds = {"f@1": Speed(calls=2, call_s=0.3, prefill_s=0.2, decode_s=0.05)}
    wait_until(lambda: learned()[1][F].call_s.count == 1, what="measures of calls")
    assert learned()[1][F].decode_s == MovingAverage(0.05, 1)
    wait_until(lambda: _prediction(controller) is not None, what="prediction in the function's info")

    before = learned()
    controller.kill()
    other = ControllerProcess(tmp_path / "other", redis_url)
    try:
        other.start()
        prediction = _prediction(other)
        assert prediction is not None
        assert prediction["starts"] == 1
        other.deploy("g")
        wait_until(lambda: other.http.post("/fn/g", json={}).is_success, what="an answer of g")
        wait_until(lambda: learned()[0][node.name].start_s.count > 1, what="measures of g's start")
        nodes, versions = learned()
        assert nodes[node.name].start_s.count == 2, "the first start is not learned again"
        assert versions[F] == before[1][F]
    finally:
        other.close()


def _prediction(controller: ControllerProcess) -> dict[str, Any] | None:
    found: dict[str, Any] | None = controller.http.get("/api/v1/functions/f").json()["prediction"]
    return found


def test_explain_tells_the_plan_of_cold_and_hot_calls_and_why_there_is_none(
    controller: ControllerProcess, node: HandNode, redis_server: RedisServer
) -> None:
    node.answer = begins
    controller.deploy("f")
    ids = [controller.http.post("/fn/f", json={}).headers["x-request-id"] for _ in range(2)]
    wait_until(lambda: len(controller.rows("f")) == 2, what="rows")
    cold, hot = (controller.http.get(f"/api/v1/invocations/{id}/plan").json() for id in ids)
    assert [cold["row"]["start"], hot["row"]["start"]] == ["warm", "hot"]
    assert cold["explanation"]["plan"] == hot["explanation"]["plan"]
    assert cold["explanation"]["plan"]["stages"][0]["node"] == node.name
    assert sum(not one["why_not"] for one in cold["explanation"]["plan"]["considered"]) == 1
    ttft = cold["explanation"]["compared"][0]
    assert ttft["observed"] == pytest.approx(cold["ttft_s"] - cold["decided_s"])
    assert ttft["error"] == pytest.approx(abs(ttft["observed"] - ttft["predicted"]) / ttft["observed"])
    assert hot["explanation"]["compared"][0]["observed"] is None
    assert hot["decided_s"] < 0 < hot["ttft_s"]

    unknown = controller.http.get("/api/v1/invocations/inv-unknown/plan")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
    with redis_server.client() as client:
        client.delete(keys.plan(cold["row"]["worker"]))
    forgotten = controller.http.get(f"/api/v1/invocations/{ids[1]}/plan")
    assert forgotten.status_code == 404
    assert "was ready already when it came, is not kept any more" in forgotten.json()["error"]["message"]
    assert "a day" in forgotten.json()["error"]["hint"]


def test_a_call_that_met_no_worker_has_no_plan(controller: ControllerProcess) -> None:
    controller.deploy("f", timeout_s=0.2)
    call = controller.http.post("/fn/f", json={})
    wait_until(lambda: controller.rows("f"), what="its row")
    answer = controller.http.get(f"/api/v1/invocations/{call.headers['x-request-id']}/plan")
    assert answer.status_code == 404
    assert f"reached no worker: HTTP {call.status_code}" in answer.json()["error"]["message"]


def _with_learner(redis_url: str, act: Callable[[StateSync, Calibrator], Awaitable[None]], fence: int) -> None:
    async def run() -> None:
        client = connect(redis_url)
        state = StateSync(client, View())
        await client.set(keys.FENCE, "7")
        try:
            await act(state, Calibrator(state, lambda: fence))
        finally:
            await client.aclose()

    asyncio.run(run())


@pytest.mark.parametrize(("fence", "kept"), [(7, False), (6, True)])
def test_what_nobody_needs_is_removed_by_the_scheduler_alone(redis_url: str, fence: int, kept: bool) -> None:
    field = keys.measures_of_node(NodeId("removed"))

    async def act(state: StateSync, calibrator: Calibrator) -> None:
        await state.client.hset(keys.MEASURES, field, msgspec.json.encode(NodeMeasures()))
        await state.resync()
        assert NodeId("removed") in state.view.node_measures
        await calibrator.prune()
        await state.resync()
        assert (NodeId("removed") in state.view.node_measures) is kept

    _with_learner(redis_url, act, fence)


def test_a_resync_makes_new_records_of_changed_measures_alone(redis_url: str) -> None:
    """A node is planned on anew when its record is another one: all of them were, whenever one start was learnt."""
    fields = [keys.measures_of_node(NodeId(name)) for name in ("a", "b", "c")]
    slow, fast = (NodeMeasures(store_bytes_per_s=MovingAverage(rate, 1)) for rate in (1e6, 1e9))

    async def act(state: StateSync, calibrator: Calibrator) -> None:
        await state.client.hset(keys.MEASURES, mapping=dict.fromkeys(fields, msgspec.json.encode(slow)))
        await state.resync()
        before = dict(state.view.node_measures)
        await state.client.hset(keys.MEASURES, fields[0], msgspec.json.encode(fast))
        await state.client.hset(keys.MEASURES, fields[2], b"of a later release")
        await state.resync()
        assert state.view.node_measures == {NodeId("a"): fast, NodeId("b"): slow}
        await state.client.hdel(keys.MEASURES, fields[2])
        await state.resync()
        now = state.view.node_measures
        assert now == {NodeId("a"): fast, NodeId("b"): slow}
        await state.client.hset(keys.MEASURES, fields[0], msgspec.json.encode(slow))
        await state.resync()
        assert now[NodeId("b")] is state.view.node_measures[NodeId("b")]
        assert now[NodeId("a")] is not before[NodeId("a")]

    _with_learner(redis_url, act, 7)


def test_when_a_pipeline_was_one_worker_is_noted_in_its_plan_once(redis_url: str) -> None:
    cuts = ((0, 2), (2, 4))
    orders = [
        WorkerOrder(
            worker=WorkerId(f"w{index}"), node=NodeId(f"n{index}"), epoch="e", version=F.version, ordered_unix_ns=1,
            spec=spec(name=F.name), stage=Stage(pipeline=PipelineId("p"), index=index, cuts=cuts),
        )
        for index in range(2)
    ]  # fmt: skip
    plan = Plan(stages=[stage(), stage()], reason="", decided_unix_ms=1000)

    def ready(whole: bool, changed_s: int, index: int = 0) -> WorkerStatus:
        return WorkerStatus(
            worker=WorkerId(f"w{index}"), node=NodeId(f"n{index}"), function=F.name, version=F.version, state="ready",
            whole=whole, changed_unix_ns=changed_s * 1_000_000_000,
        )  # fmt: skip

    async def act(state: StateSync, calibrator: Calibrator) -> None:
        async def noted() -> list[int]:
            raw = [await state.client.get(keys.plan(order.worker)) for order in orders]
            return [msgspec.json.decode(one, type=Plan).whole_unix_ms for one in raw if one]

        for order in orders:
            state.view.put_order(order)
            await state.client.set(keys.plan(order.worker), msgspec.json.encode(plan), ex=100)
        state.view.version_measures[F] = VersionMeasures()
        for status, expected in (
            (ready(False, 2), 0), (ready(True, 3, index=1), 0), (ready(True, 5), 5000), (ready(True, 7), 5000)
        ):  # fmt: skip
            await calibrator.learn_start(status)
            assert await noted() == [expected] * 2
        assert 0 < await state.client.ttl(keys.plan(orders[0].worker)) <= 100, "it is kept no longer for it"
        await state.client.delete(keys.plan(orders[1].worker))
        await calibrator.note_whole(orders[0], plan, ready(True, 9))
        assert await noted() == [9000], "a plan that nobody keeps any more is not written again"

    _with_learner(redis_url, act, 7)


def test_a_worker_that_lacked_device_memory_raises_the_estimate_of_its_version(redis_url: str) -> None:
    order = WorkerOrder(
        worker=WorkerId("w"), node=NodeId("n"), epoch="e", version=F.version, ordered_unix_ns=1, spec=spec(name=F.name),
        devices=(DeviceShare(DeviceId("cpu:0"), 100), DeviceShare(DeviceId("cpu:1"), 20)),
    )  # fmt: skip
    failed = WorkerStatus(
        worker=order.worker, node=order.node, function=F.name, version=F.version, state="failed", changed_unix_ns=1,
        error=DeviceOutOfMemory("out of device memory").info(),
    )  # fmt: skip

    async def act(state: StateSync, calibrator: Calibrator) -> None:
        state.view.version_measures[F] = VersionMeasures()
        state.view.put_order(order)
        state.view.put_status(failed)
        await calibrator._learn()
        assert state.view.version_measures[F].device_short_bytes == 120

    _with_learner(redis_url, act, 7)
