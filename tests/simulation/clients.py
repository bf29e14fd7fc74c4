"""Simulated clients: they call, deploy, scale, make keys and revoke them, and remember what they were told."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fleetstart.controller.auth.api_key import new_key_text
from fleetstart.controller.state.access_records import Credential, KeyRecord, ProjectRecord, Quotas
from fleetstart.controller.state.records import ScaleOverride
from fleetstart.controller.state.traffic import scaled
from fleetstart.runtime.contract.function.spec import FunctionSpec, Scale
from fleetstart.runtime.contract.ids import BundleId, FunctionName
from fleetstart.runtime.contract.object_keys import bundle_key
from fleetstart.runtime.contract.sizes import MIB
from tests.simulation.controllers import SimulatedController
from tests.simulation.plan import FunctionPlan
from tests.simulation.processes import Process
from tests.simulation.weights import CHECKPOINT, OBJECTS
from tests.simulation.workers import in_process

BUNDLE = BundleId(hashlib.sha256(b"a bundle").hexdigest())
TIMEOUT_S = 40.0


class Gone(Exception):
    """The connection ended, or none was made."""


@dataclass(slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    controller: str
    asked_ns: int


@dataclass(slots=True)
class Told:
    """What clients were told."""

    rows: dict[str, Answer] = field(default_factory=dict)
    """Answers of calls that ran, by the id of the call."""
    keyed: dict[str, list[Answer]] = field(default_factory=dict)
    """Answers of 200 by Idempotency-Key."""
    accepted: dict[str, Answer] = field(default_factory=dict)
    """Async calls that were accepted."""
    revoked: dict[str, tuple[str, int, str]] = field(default_factory=dict)
    """Revoked keys: text, when it was acknowledged, and by which controller."""
    version: dict[tuple[str, str], int] = field(default_factory=dict)
    """The newest version that each controller has served of each function."""
    statuses: dict[int, int] = field(default_factory=dict)


class Clients:
    def __init__(self, world: Any, process: Process) -> None:
        self._world = world
        self.process = process
        self.told = Told()
        self._key = ""
        self._numbers = 0

    # ── requests ───────────────────────────────────────────────────────────────────────────────────

    async def _ask(self, name: str, begin: Callable[[SimulatedController, Callable[[Any], None]], Any]) -> Any:
        """Sends a request to a controller. Errors: Gone."""
        world = self._world
        controller: SimulatedController | None = world.controllers[name]
        if controller is None or controller.stopping.is_set():
            await asyncio.sleep(0.001)
            raise Gone("connection refused")
        answered: asyncio.Future[Any] = world.loop.create_future()
        world.waiting[answered] = (self.process, controller.process)
        process = controller.process

        def arrive() -> None:
            world.loop.create_task(begin(controller, lambda value: world.answer(process, answered, (value,))))

        world.loop.call_later(world.network.between(self.process, process), arrive, context=in_process(process))
        try:
            async with asyncio.timeout(TIMEOUT_S):
                (value,) = await answered
        except Exception as error:
            raise Gone(repr(error)) from error
        finally:
            world.waiting.pop(answered, None)
        return value

    async def manage(self, name: str, work: Callable[[SimulatedController], Awaitable[Any]]) -> Any:
        """A request to the management API. Errors: Gone; those of the work."""
        value = await self._ask(name, lambda controller, respond: controller.manage(work, respond))
        if isinstance(value, Exception):
            raise value
        return value

    async def call(self, name: str, function: str, body: bytes, *, key: str = "", **headers: str) -> Answer:
        """Calls a function. Errors: Gone."""
        world, path = self._world, f"/fn/{function}"
        asked_ns = world.loop.now_ns
        controller = world.controllers[name]
        own = controller.id if controller is not None else ""
        floor = self.told.version.get((own, function), 0)
        lines = [("authorization", f"Bearer {key or self._key}"), ("content-length", str(len(body)))]
        lines += [(line.replace("_", "-"), value) for line, value in headers.items()]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "client": ("10.0.0.9", 1),
            "server": None, "headers": [(line.encode(), value.encode()) for line, value in lines],
        }  # fmt: skip
        status, got, content = await self._ask(name, lambda one, respond: one.serve(scope, body, respond))
        answer = Answer(status, got, content, own, asked_ns)
        world.note("client", f"{function} at {own}: {status} {content[:60]!r} {headers or ''}".rstrip())
        self.told.statuses[status] = self.told.statuses.get(status, 0) + 1
        if status == 200 and "idempotent-replayed" not in got:
            self.told.rows[got["x-request-id"]] = answer
            version = int(got["fs-version"])
            if (
                version < floor and "idempotency_key" not in headers and not world.redis_lost
            ):  # which may go on with an earlier call
                world.violated(
                    f"a version never goes back: {own} served {function}@{version} to a call that came after an "
                    f"answer of @{floor}"
                )
            self.told.version[own, function] = max(version, self.told.version.get((own, function), 0))
        return answer

    def _waits_s(self, least_s: float, most_s: float) -> float:
        return float(self._world.plan.pace.waits * self._world.chance.uniform(least_s, most_s))

    def _any(self) -> str:
        return str(self._world.chance.choice(list(self._world.controllers)))

    async def _until_done(self, work: Callable[[SimulatedController], Awaitable[Any]], tries: int = 40) -> Any:
        for _ in range(tries):
            try:
                return await self.manage(self._any(), work)
            except Exception as error:
                last = error
                await asyncio.sleep(0.2)
        self._world.note("client", f"gave up: {last!r}")
        return None

    # ── what they do ───────────────────────────────────────────────────────────────────────────────

    async def begin(self) -> None:
        """Makes a key and deploys all functions."""
        world = self._world
        world.store.data[bundle_key(BUNDLE)] = (b"a bundle", world.unix_ms())
        world.store.data.update({key: (data, world.unix_ms()) for key, data in OBJECTS.items()})
        context = in_process(self.process)
        await asyncio.sleep(world.plan.pace.up_s)
        self._key = await world.loop.create_task(self._new_key("user"), context=context)
        if world.plan.quota:
            quotas = Quotas(workers=world.plan.quota)
            await self._until_done(
                lambda controller: controller.projects.change(
                    "default",
                    lambda _: ProjectRecord(name="default", quotas=quotas, created_unix_ms=1, created_by="user"),
                )
            )
        for function in world.plan.functions:
            await self._deploy(function)
        await asyncio.sleep(world.plan.pace.deployed_s)

    async def work(self, for_s: float) -> None:
        chance, pace, ends_s = self._world.chance, self._world.plan.pace, self._world.loop.time() + for_s
        doing: list[asyncio.Task[None]] = []
        while self._world.loop.time() < ends_s:
            await asyncio.sleep(chance.expovariate(pace.operations_per_s))
            function = chance.choice(self._world.plan.functions)
            (what,) = chance.choices(
                (self._sync, self._keyed, self._async, self._deploy, self._scale, self._revoke), pace.operations
            )
            doing.append(asyncio.create_task(what(function)))
        await asyncio.gather(*doing)

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    async def _sync(self, function: FunctionPlan) -> None:
        try:
            await self.call(self._any(), function.name, b"sync")
        except Gone:
            return

    async def _keyed(self, function: FunctionPlan) -> None:
        key = f"key-{self._number()}"
        self.told.keyed[key] = []
        await asyncio.gather(*(self._repeat(function, key) for _ in range(2)))

    async def _repeat(self, function: FunctionPlan, key: str) -> None:
        chance = self._world.chance
        await asyncio.sleep(chance.choice((0.0, chance.uniform(0, self._world.plan.pace.repeated_s))))
        for _ in range(6):
            try:
                answer = await self.call(self._any(), function.name, key.encode(), idempotency_key=key)
                if answer.status == 200:
                    self.told.keyed[key].append(answer)
                    return
            except Gone:
                pass
            await asyncio.sleep(self._waits_s(0.1, 1.5))

    async def _async(self, function: FunctionPlan) -> None:
        keyed = self._world.chance.random() < 0.7
        body = b"job-%d" % self._number()
        more = {"idempotency_key": body.decode()} if keyed else {}
        for _ in range(6 if keyed else 1):
            try:
                answer = await self.call(self._any(), function.name, body, prefer="respond-async", **more)
                if answer.status == 202:
                    self.told.accepted[answer.headers["x-request-id"]] = answer
                    return
            except Gone:
                pass
            await asyncio.sleep(self._waits_s(0.1, 1.5))

    async def _deploy(self, function: FunctionPlan) -> None:
        spec = FunctionSpec(
            name=FunctionName(function.name),
            bundle=BUNDLE,
            entry="a:b",
            memory_bytes=256 * MIB,
            scale=Scale(min=function.least, max=function.most, keep_alive_s=function.keep_alive_s),
            concurrency=function.concurrency,
            retries=function.retries,
            timeout_s=12.0,
            start_timeout_s=5.0,
            env={"NUMBER": str(self._number())},
            weights=CHECKPOINT if function.keeps else None,
            keep="host" if function.keeps else "",
        )
        await self._until_done(lambda controller: controller.registry.deploy(spec, time.time_ns() // 1_000_000), 6)

    async def _scale(self, function: FunctionPlan) -> None:
        change = ScaleOverride(min=self._world.chance.randint(0, min(1, function.most)))
        await self._until_done(
            lambda controller: controller.registry.change(
                FunctionName(function.name), lambda record: scaled(record, change)
            ),
            4,
        )

    async def _new_key(self, name: str) -> str:
        made = new_key_text()
        record = KeyRecord(
            name=name,
            rights=["invoke"],
            credentials=[Credential(id=made.id, sha256=made.sha256, created_unix_ms=1)],
            created_unix_ms=1,
            created_by="local",
        )
        await self._until_done(lambda controller: controller.keys.change(name, lambda _: record))
        return made.text

    async def _revoke(self, function: FunctionPlan) -> None:
        """Makes a key, revokes it, and tries it everywhere."""
        world, name = self._world, f"key-{self._number()}"
        text = await self._new_key(name)
        await asyncio.sleep(self._waits_s(0.5, 2.0))

        def revoke(record: KeyRecord | None) -> KeyRecord:
            if record is None:
                raise LookupError("it was never made")
            return msgspec.structs.replace(record, revoked_unix_ms=1)

        where = self._any()
        try:
            await self.manage(where, lambda controller: controller.keys.change(name, revoke, durable=True))
        except Exception:
            return
        controller = world.controllers[where]
        self.told.revoked[name] = (text, world.loop.now_ns, controller.id if controller is not None else "")
        for _ in range(world.plan.pace.revoked_tries):
            await self.try_revoked(name, self._any(), function.name)
            await asyncio.sleep(self._waits_s(0.1, 1.0))

    async def try_revoked(self, name: str, where: str, function: str) -> bool:
        """True if a call with a revoked key was refused, or not answered. One that must be refused, and is not, is a
        violation."""
        world = self._world
        text, told_ns, by = self.told.revoked[name]
        controller = world.controllers[where]
        if controller is None:
            return True
        read_ns = controller.core.view.synced_ns
        try:
            answer = await self.call(where, function, b"revoked", key=text)
        except Gone:
            return True
        refused = answer.status == 401
        if not refused and (controller.id == by or read_ns > told_ns + 5_000_000_000):
            world.violated(
                f"a revoked key is refused: {name} was revoked at {by} at {told_ns / 1e9:.3f} s, and {controller.id}, "
                f"which has read all at {read_ns / 1e9:.3f} s, answered {answer.status} at {world.loop.time():.3f} s"
            )
        return refused
