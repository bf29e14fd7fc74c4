"""Claim: a controller of 10,000 functions and 2,000 workers has a free event loop.

A real controller and a real Redis; 200 simulated nodes in this process renew their leases and reports once a second,
answer orders at once, and serve every call from one small app. 2,000 functions have a warm worker each. Measured while
nothing is called, while a warm function is called again and again, and while cold ones are started: CPU of the
controller, lag of its event loop by its own histogram, what is left of the leader's lease. Beside it, in this process
and in CPU time: a full read of Redis, steps of the reconciler, kept workers, a list of all functions.

All of it runs before its neighbours on the machine where that is allowed. Commits are compared by `--before FILE`, the
JSON of an earlier run: lag is in real time, and neighbours on the machine count; CPU time is not.

Run: python -m tests.bench.control_plane --no-peer [--json FILE] [--before FILE] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import redis.asyncio as redis
from prometheus_client.parser import text_string_to_metric_families

from fleetstart.controller.api.functions import FunctionsApi
from fleetstart.controller.billing.budget_watch import kept_workers
from fleetstart.controller.scheduler.agenda import Agenda
from fleetstart.controller.scheduler.reconcile import Reconciler
from fleetstart.controller.state.records import FunctionRecord, VersionKey, VersionRecord
from fleetstart.controller.state.redis_client import connect
from fleetstart.controller.state.redis_server.stream_followers import StreamFollowers
from fleetstart.controller.state.sync import StateSync
from fleetstart.controller.state.view import View
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.function.spec import FunctionSpec, Scale, spec_digest
from fleetstart.runtime.contract.ids import BundleId, FunctionName, NodeId, Version, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder, WorkerStatus
from fleetstart.runtime.contract.node.reports import FunctionLoad, GatewayReport, NodeReport
from fleetstart.runtime.contract.sizes import GIB, MIB
from tests.bench.harness.samples import Report, fine, median, parse_options, percentile, progress
from tests.controller.conftest import ControllerProcess
from tests.controller.worker_app import WorkerApp
from tests.servers import AppServer, RedisServer, wait_until

FUNCTIONS, WORKERS, NODES = 10_000, 2_000, 200
QUICK = (300, 60, 6)
WINDOW_S, QUICK_WINDOW_S = 30.0, 1.0
BATCH = 500
FIRST = Version(1)


def name_of(index: int) -> FunctionName:
    return FunctionName(f"f{index:05d}")


def spec_of(index: int, warm: bool) -> FunctionSpec:
    """Of the warm ones half is kept by `min`, half by a long keep-alive."""
    scale = Scale(min=int(warm and index % 2 == 0), max=4, keep_alive_s=3600.0)
    return FunctionSpec(
        name=name_of(index), bundle=BundleId("0" * 64), entry="handler:run", memory_bytes=64 * MIB, concurrency=4,
        scale=scale, env={"MODE": "bench"}, tags={"team": f"t{index % 20}"},
    )  # fmt: skip


class SimulatedNodes:
    """The nodes' side of Redis: leases, statuses, answers to orders. Runs in a thread of its own."""

    def __init__(self, url: str, count: int, endpoint: str, token: str) -> None:
        self._url, self._endpoint, self._token = url, endpoint, token
        self.names = [NodeId(f"n{index:04d}") for index in range(count)]
        self._used: dict[NodeId, int] = dict.fromkeys(self.names, 0)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._ready.wait(30)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        client: redis.Redis = redis.Redis.from_url(self._url)
        await self._renew(client)
        self._ready.set()
        tasks = [asyncio.create_task(self._leases(client)), asyncio.create_task(self._orders(client))]
        await self._stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.aclose()

    async def _leases(self, client: redis.Redis) -> None:
        while True:
            await asyncio.sleep(0.8)
            await self._renew(client)

    async def _renew(self, client: redis.Redis) -> None:
        async with client.pipeline(transaction=False) as pipe:
            for index, name in enumerate(self.names):
                changing = int(time.time()) if index % 4 == 0 else 0  # a quarter of the nodes has news each second
                report = NodeReport(
                    node=name, epoch="e", address="127.0.0.1", memory_bytes=64 * GIB, cpus=16,
                    memory_used_bytes=self._used[name] + changing, profiles=["python", "torch"],
                )  # fmt: skip
                pipe.set(keys.node(name), msgspec.json.encode(report), px=3000)
                pipe.hset(keys.NODES, name, "1")
            await pipe.execute()

    async def _orders(self, client: redis.Redis) -> None:
        pubsub = client.pubsub(ignore_subscribe_messages=True)
        await pubsub.psubscribe(keys.events_desired(NodeId("*")))
        while True:
            message = await pubsub.get_message(timeout=5.0)
            if message is None:
                continue
            order = msgspec.json.decode(message["data"], type=WorkerOrder)
            raw = msgspec.json.encode(self.status(order, "ready" if order.wanted == "run" else "gone"))
            async with client.pipeline(transaction=False) as pipe:
                pipe.hset(keys.observed(order.node), order.worker, raw)
                pipe.publish(keys.EVENTS_OBSERVED, raw)
                await pipe.execute()

    def status(self, order: WorkerOrder, state: Any) -> WorkerStatus:
        return WorkerStatus(
            worker=order.worker, node=order.node, function=order.spec.name, version=order.version, state=state,
            endpoint=self._endpoint, token=self._token, changed_unix_ns=time.time_ns(),
        )  # fmt: skip


async def seed(url: str, nodes: SimulatedNodes, functions: int, workers: int) -> None:
    """Writes functions, versions, orders and statuses as controllers and nodes do."""
    client: redis.Redis = redis.Redis.from_url(url)
    for begin in range(0, functions, BATCH):
        async with client.pipeline(transaction=False) as pipe:
            for index in range(begin, min(begin + BATCH, functions)):
                spec = spec_of(index, index < workers)
                function = FunctionRecord(name=spec.name, live=FIRST, deployed_unix_ms=1, started=FIRST)
                version = VersionRecord(
                    version=FIRST, digest=spec_digest(spec), spec=spec, segment_bytes=0, created_unix_ms=1
                )
                pipe.hset(keys.FUNCTIONS, spec.name, msgspec.json.encode(function))
                pipe.hset(keys.versions(spec.name), str(FIRST), msgspec.json.encode(version))
                if index < workers:
                    node = nodes.names[index % len(nodes.names)]
                    order = WorkerOrder(
                        worker=WorkerId(f"w{index}"), node=node, epoch="e", version=FIRST, spec=spec,
                        ordered_unix_ns=1, decided_unix_ns=1,
                    )  # fmt: skip
                    pipe.hset(keys.desired(node), order.worker, msgspec.json.encode(order))
                    pipe.hset(keys.observed(node), order.worker, msgspec.json.encode(nodes.status(order, "ready")))
            await pipe.execute()
    await client.aclose()


# ── a real controller ──────────────────────────────────────────────────────────────────────────────


def metrics(controller: ControllerProcess) -> dict[str, Any]:
    """CPU seconds, and the lag's counts by upper bound."""
    text = controller.http.get("/metrics").text
    found: dict[str, Any] = {"lag": {}}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "process_cpu_seconds_total":
                found["cpu_s"] = sample.value
            elif sample.name == "fleetstart_event_loop_lag_seconds_bucket":
                found["lag"][float(sample.labels["le"])] = sample.value
    return found


def lag_p99_ms(before: dict[float, float], after: dict[float, float]) -> float:
    """Upper bound of the bucket that holds the 99th percentile, linear inside it."""
    counts = [(bound, after[bound] - before[bound]) for bound in sorted(after)]
    wanted, low, below = counts[-1][1] * 0.99, 0.0, 0.0
    for bound, count in counts:
        if count >= wanted:
            inside = (wanted - below) / max(1.0, count - below)
            return (low + (min(bound, 10.0) - low) * inside) * 1000
        low, below = bound, count
    return float("inf")


def observed(
    controller: ControllerProcess, server: RedisServer, window_s: float, each: Callable[[], float | None]
) -> dict[str, Any]:
    """What a window of time shows, with `each` done again and again in it; it returns how long a call took, in ms."""
    begun, first, calls, margins = time.monotonic(), metrics(controller), [], []
    with server.client() as client:
        while time.monotonic() - begun < window_s:
            took_ms = each()
            if took_ms is not None:
                calls.append(took_ms)
            margins.append(float(client.pttl(keys.LEADER)))
    last, took_s = metrics(controller), time.monotonic() - begun
    return {
        "cpu_percent": (last["cpu_s"] - first["cpu_s"]) / took_s * 100,
        "lag_p99_ms": lag_p99_ms(first["lag"], last["lag"]),
        "lease_left_ms": max(0.0, min(margins)),
        "calls_p50_ms": median(calls) if calls else 0.0,
        "calls_p99_ms": percentile(calls, 0.99) if calls else 0.0,
        "calls": len(calls),
    }


class _Separate(ControllerProcess):
    """A controller started as by its supervisor: its processor time and memory are its own."""

    command = (sys.executable, "-m", "fleetstart.controller")


def live(server: RedisServer, home: Path, functions: int, workers: int, window_s: float) -> dict[str, Any]:
    controller = _Separate(home, server.url)
    cold = iter(range(workers, functions))

    def call(index: int) -> float:
        begun_s = time.perf_counter()
        answer = controller.http.get(f"/fn/{name_of(index)}")
        assert answer.status_code == 200, answer.text
        return (time.perf_counter() - begun_s) * 1000

    def rest(seconds: float) -> None:
        time.sleep(seconds)

    def cold_call() -> float:
        took_ms = call(next(cold))
        rest(0.1)
        return took_ms

    try:
        controller.start()
        wait_until(lambda: call(0) < 5000, 60)
        rest(min(5.0, window_s))
        found = {}
        for title, each in (
            ("idle", lambda: rest(0.05)), ("warm calls", lambda: call(1)), ("cold starts", cold_call),
        ):  # fmt: skip
            progress(f"{title}: {window_s:g} s")
            found[title] = observed(controller, server, window_s, each)
        return found
    finally:
        controller.close()


# ── in this process ────────────────────────────────────────────────────────────────────────────────


async def cpu_ms(work: Callable[[], object], times: int) -> list[float]:
    found = []
    for _ in range(times):
        begun_s = time.process_time()
        result = work()
        if isinstance(result, Awaitable):
            await result
        found.append((time.process_time() - begun_s) * 1000)
    return found


async def inside(url: str, functions: int, workers: int, rounds: int) -> dict[str, list[float]]:
    client, view = connect(url), View()
    state = StateSync(client, view)
    await state.resync()
    reconciler = Reconciler()
    api = FunctionsApi(
        url="", view=view, registry=None, client=client,  # type: ignore[arg-type]
        followers=StreamFollowers(client, client), stopping=asyncio.Event(),
    )  # fmt: skip
    cold = VersionKey(name_of(functions - 1), FIRST)

    def step(**only: Any) -> object:
        return reconciler.step(view, now_ns=time.monotonic_ns(), now_unix_ns=time.time_ns(), **only)

    def start_one() -> object:
        loads = {str(cold): FunctionLoad(1, 0, oldest_unix_ms=1)}
        view.put_gateway(GatewayReport(gateway="g", loads=loads), time.monotonic_ns())
        made = step(keys=[cold])
        view.put_gateway(GatewayReport(gateway="g"), time.monotonic_ns())
        return made

    agenda = Agenda(view)
    now_ns = [time.monotonic_ns()]

    def second() -> None:
        now_ns[0] += 1_000_000_000
        while keys := agenda.take(now_ns[0]):
            made = reconciler.step(view, now_ns=now_ns[0], now_unix_ns=time.time_ns(), keys=keys)
            agenda.done(made.rests, made.unplaced.keys(), now_ns[0])

    step()
    second()
    found = {
        "full read": await cpu_ms(state.resync, rounds),
        "steps of a second without changes": await cpu_ms(second, rounds),
        "step that starts one worker": await cpu_ms(start_one, rounds),
        "kept workers": await cpu_ms(lambda: kept_workers(view, frozenset()), rounds),
        "list of all functions": await cpu_ms(lambda: [api.info(one) for one in view.functions.values()], rounds),
    }
    assert len(view.orders) == workers
    await client.aclose()
    return found


# ── the report ─────────────────────────────────────────────────────────────────────────────────────


def measure(functions: int, workers: int, nodes: int, window_s: float, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="fs-control-plane-") as folder:
        server = RedisServer(Path(folder) / "redis")
        server.start()
        token = secrets.token_hex(8)
        app = AppServer(WorkerApp(token, 1000), log_level="critical").start()
        simulated = SimulatedNodes(server.url, nodes, f"127.0.0.1:{app.port}", token)
        try:
            simulated.start()
            progress("writing functions and workers")
            asyncio.run(seed(server.url, simulated, functions, workers))
            progress("in this process")
            own = asyncio.run(inside(server.url, functions, workers, rounds))
            return {"inside": own, "live": live(server, Path(folder) / "home", functions, workers, window_s)}
        finally:
            simulated.close()
            app.close()
            server.close()


def against(before: dict[str, Any] | None, now: float, *path: str) -> str:
    value: Any = before
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    if isinstance(value, list):
        value = median(value)
    if not isinstance(value, float | int):
        return "–"
    return f"{fine(float(value))} ({fine(now / value)}×)" if value > 0 else fine(float(value))


def options_of_this(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--before", type=Path, metavar="FILE", help="JSON of a run at another commit")


def main() -> None:
    options = parse_options(__doc__, rounds=5, quick_rounds=2, more=options_of_this)
    functions, workers, nodes = QUICK if options.quick else (FUNCTIONS, WORKERS, NODES)
    with contextlib.suppress(PermissionError):
        os.nice(-15)
    before = json.loads(options.extra["before"].read_text())["samples"] if options.extra["before"] else None
    samples = measure(functions, workers, nodes, QUICK_WINDOW_S if options.quick else WINDOW_S, options.rounds)
    report = Report(f"the loop of a controller of {functions:,} functions and {workers:,} workers is free")
    report.setup = {"functions": functions, "workers": workers, "nodes": nodes, "clock": "CPU time, but for lag"}
    report.samples = samples
    report.tell("In one process, CPU ms", [
        ["", "ms", "before"],
        *([what, fine(median(each)), against(before, median(each), "inside", what)]
          for what, each in samples["inside"].items()),
    ])  # fmt: skip
    units = {
        "cpu_percent": "CPU of a core, %", "lag_p99_ms": "event loop lag, p99, ms", "lease_left_ms":
        "least left of the leader's lease, ms", "calls_p50_ms": "calls, p50, ms", "calls_p99_ms": "calls, p99, ms",
    }  # fmt: skip
    report.tell("A real controller", [
        ["", "measured", "before"],
        *([f"{title}: {said}", fine(seen[unit]), against(before, seen[unit], "live", title, unit)]
          for title, seen in samples["live"].items() for unit, said in units.items()
          if seen["calls"] or not unit.startswith("calls")),
    ])  # fmt: skip
    report.save(options.json)


if __name__ == "__main__":
    main()
