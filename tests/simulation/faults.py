"""Faults as they happen: each begins at its time, lasts, and is undone; after the last one all processes run."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from tests.simulation.plan import Fault


class Faults:
    def __init__(self, world: Any) -> None:
        self._world = world
        self._stopped: dict[Any, int] = {}
        self.cut_off_ns: dict[str, int] = {}
        """How long each process was cut off from Redis, or stopped."""

    async def run(self) -> None:
        await asyncio.gather(*(self._one(fault) for fault in self._world.plan.faults))

    async def _one(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at_s)
        self._world.note("FAULT", str(fault).strip())
        await getattr(self, "_" + fault.kind.replace(" ", "_"))(fault)
        self._world.note("FAULT", f"over: {fault.kind} {fault.target}")

    # ── processes ──────────────────────────────────────────────────────────────────────────────────

    async def _kill_controller(self, fault: Fault) -> None:
        controller = self._world.controllers[fault.target]
        if controller is None:
            return
        self._world.controllers[fault.target] = None
        self._world.loop.kill_process(controller.process)
        controller.killed()
        self._world.disconnect(controller.process, aiohttp.ServerDisconnectedError())
        await asyncio.sleep(fault.for_s)
        self._world.start_controller(fault.target)

    async def _end_controller(self, fault: Fault) -> None:
        controller = self._world.controllers[fault.target]
        if controller is None or controller.stopping.is_set():
            return
        ending = self._world.loop.spawn(controller.process, controller.shut_down())
        await asyncio.wait([ending], timeout=8.0)
        if self._world.controllers[fault.target] is controller:
            await self._kill_controller(fault)

    async def _kill_node(self, fault: Fault) -> None:
        node = self._world.nodes[fault.target]
        if node is None:
            return
        self._world.nodes[fault.target] = None
        self._world.loop.kill_process(node.process)
        for worker in node.workers.values():
            self._world.history.workers.pop(worker.endpoint, None)
            life = self._world.history.lives[worker.order.worker]
            life.ended_ns, life.killed = self._world.loop.now_ns, True
        for row in node.ledger.peek(1_000_000):
            self._world.history.lives[row.worker].killed = True
        self._world.disconnect(node.process, aiohttp.ServerDisconnectedError())
        await asyncio.sleep(fault.for_s)
        self._world.start_node(fault.target)

    async def _stop_controller(self, fault: Fault) -> None:
        await self._stop(self._world.controllers[fault.target], fault)

    async def _stop_node(self, fault: Fault) -> None:
        await self._stop(self._world.nodes[fault.target], fault)

    async def _stop(self, one: Any, fault: Fault) -> None:
        if one is not None:
            await self._stop_process(one.process, fault)

    async def _stop_process(self, process: Any, fault: Fault) -> None:
        loop, stopped = self._world.loop, self._stopped
        stopped[process] = stopped.get(process, 0) + 1  # not by name: one that is started anew runs
        loop.stop_process(process)
        await asyncio.sleep(fault.for_s)
        self._cut(process.name, fault)
        stopped[process] -= 1
        if not stopped[process]:
            loop.resume_process(process)

    async def _kill_worker(self, fault: Fault) -> None:
        workers = list(self._world.history.workers.values())
        if workers:
            worker = self._world.chance.choice(workers)
            self._world.note("FAULT", f"killed is {worker.order.worker}")
            worker.fail()

    async def _step_clock(self, fault: Fault) -> None:
        step_ns = round(fault.size * 1e9)
        errors = self._world.clock_errors_ns
        errors[fault.target] = errors.get(fault.target, 0) + step_ns
        for process in self._world.processes:
            if process.name == fault.target:
                process.clock_error_ns += step_ns

    # ── network ────────────────────────────────────────────────────────────────────────────────────

    def _cut(self, name: str, fault: Fault) -> None:
        self.cut_off_ns[name] = self.cut_off_ns.get(name, 0) + round(fault.for_s * 1e9)

    async def _cut_off(self, fault: Fault) -> None:
        network = self._world.network
        if fault.target in network.cut_off:
            return
        network.cut_off.add(fault.target)
        for subscriber in list(self._world.server.subscribers):
            if subscriber.process.name == fault.target:
                subscriber.broken()
        await asyncio.sleep(fault.for_s)
        self._cut(fault.target, fault)
        network.cut_off.discard(fault.target)

    async def _part(self, fault: Fault) -> None:
        pair = frozenset(fault.target.split())
        self._world.network.apart.add(pair)
        await asyncio.sleep(fault.for_s)
        self._world.network.apart.discard(pair)

    async def _share(self, name: str, fault: Fault, of: Any = None) -> None:
        of = of or self._world.network
        before = getattr(of, name)
        setattr(of, name, max(before, fault.size))
        await asyncio.sleep(fault.for_s)
        setattr(of, name, 0.0)
        for process in self._world.processes:
            self._cut(process.name, fault)

    async def _lose_requests(self, fault: Fault) -> None:
        await self._share("loss", fault)

    async def _slow_redis(self, fault: Fault) -> None:
        await self._share("slow", fault)

    async def _lose_publications(self, fault: Fault) -> None:
        self._world.network.publications_twice = fault.size
        await self._share("publications_lost", fault)
        self._world.network.publications_twice = 0.0

    async def _lose_objects(self, fault: Fault) -> None:
        await self._share("loss", fault, self._world.store)

    # ── Redis ──────────────────────────────────────────────────────────────────────────────────────

    async def _stop_redis(self, fault: Fault) -> None:
        await self._stop_process(self._world.server.process, fault)
        for process in self._world.processes:
            self._cut(process.name, fault)

    async def _refuse_writes(self, fault: Fault) -> None:
        self._world.server.refuses_writes = True
        await asyncio.sleep(fault.for_s)
        for process in self._world.processes:
            self._cut(process.name, fault)
        self._world.server.refuses_writes = False

    async def _restart_redis(self, fault: Fault) -> None:
        server, network = self._world.server, self._world.network
        names = {process.name for process in self._world.processes}
        network.cut_off |= names
        server.restart()
        self._world.monitor.reload()
        await asyncio.sleep(min(fault.for_s, 3.0))
        for name in names:
            self._cut(name, fault)
        network.cut_off -= names

    async def _lose_the_log(self, fault: Fault) -> None:
        self._world.server.hold_log()
        self._world.redis_lost = True
        await asyncio.sleep(min(fault.for_s, 1.0))
        await self._restart_redis(fault)
