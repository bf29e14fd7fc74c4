"""A simulated controller: the product's own wiring of gateway, scheduler, ledger and async calls, over a simulated
Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from fleetstart.controller.api.traces import History
from fleetstart.controller.async_wiring import build_async_invocations
from fleetstart.controller.auth.middleware import AuthMiddleware
from fleetstart.controller.auth.secret_encryption import SecretCipher
from fleetstart.controller.background import run_with_restarts
from fleetstart.controller.config import Config
from fleetstart.controller.core_wiring import build_core
from fleetstart.controller.registry.registry import Registry
from fleetstart.controller.state.access_records import KeyRecord, ProjectRecord
from fleetstart.controller.state.cas_hash import CasHash
from fleetstart.controller.state.redis_client import RedisClients
from fleetstart.runtime.contract import redis_keys as keys
from tests.simulation.processes import Process
from tests.simulation.store.client import Client
from tests.simulation.weights import SimulatedPeerKeys
from tests.simulation.workers import WorkerSession

CLIENT_TIMEOUT_S = 2.0
"""The product's own (`redis_client.connect`), which also tries once more."""


class SimulatedController:
    """One start of a controller."""

    def __init__(self, world: Any, process: Process, home: Path, gateway_id: str) -> None:
        self.world = world
        self.process = process
        self.id = gateway_id
        self.client = Client(world.loop, world.server, world.network, process, retries=1, timeout_s=CLIENT_TIMEOUT_S)
        config = Config(home=home, redis_url="", store="", url="http://sim", plain_links=True)
        cipher = SecretCipher(home, "")
        client, session = cast(Any, self.client), cast(Any, WorkerSession(world, process))
        clients = RedisClients(leases=client, view=client, ledger=client, calls=client, followers=client)
        self.core = core = build_core(config, gateway_id, cipher, clients=clients, session=session)
        core.scheduler.use_peer_keys(SimulatedPeerKeys(core.view))
        self.stopping = asyncio.Event()
        self.invocations = build_async_invocations(
            config,
            core,
            world.store.of(process),
            History(client, cast(Any, None)),
            self.stopping,
            cast(Any, None),
        )
        audit = SimpleNamespace(record_rejection=lambda *_: None, record_use=lambda *_: None)
        rules = SimpleNamespace(is_open=lambda path: False, before_sync=frozenset())
        self.app = AuthMiddleware(
            self.invocations.layer, core.view, cast(Any, audit), cast(Any, rules), loopback=False, is_open=False
        )
        self.registry = Registry(core.state, world.store.of(process))
        self.keys: CasHash[KeyRecord] = CasHash(core.state, keys.KEYS, KeyRecord)
        self.projects: CasHash[ProjectRecord] = CasHash(core.state, keys.PROJECTS, ProjectRecord)

    async def run(self) -> None:
        self.core.ledger.recover()
        # What the watch measures, the memory of a real Redis, is not simulated.
        parts = [part for part in (*self.core.parts, *self.invocations.parts) if part is not self.core.memory]
        await asyncio.gather(*(run_with_restarts(part) for part in parts))

    async def shut_down(self) -> None:
        """What a controller does between SIGTERM and its end."""
        self.stopping.set()
        await self.invocations.hand_back()
        await self.core.withdraw()

    def killed(self) -> None:
        """Frees what the kernel frees of a process that was killed: the locks of its journal."""
        self.core.journal._file.close(delete=False)
        self.core.overflow.close()

    # ── requests ───────────────────────────────────────────────────────────────────────────────────

    async def serve(self, scope: dict[str, Any], body: bytes, respond: Callable[[Any], None]) -> None:
        """One HTTP request."""
        status, headers, parts = 0, {}, bytearray()
        given = False
        gone = asyncio.Event()

        async def receive() -> dict[str, Any]:
            nonlocal given
            if given:
                await gone.wait()
                return {"type": "http.disconnect"}
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = {name.decode(): value.decode() for name, value in message.get("headers", ())}
            else:
                parts.extend(message.get("body", b""))
                if not message.get("more_body", False):
                    respond((status, headers, bytes(parts)))

        try:
            await self.app(scope, cast(Any, receive), send)
        except Exception as error:
            if self.process.alive:  # what has died is closed after the run
                self.world.violated(f"a request has an answer: {scope['path']} at {self.id} ended with {error!r}")
            raise

    async def manage(
        self, work: Callable[[SimulatedController], Awaitable[Any]], respond: Callable[[Any], None]
    ) -> None:
        """One request of the management API."""
        try:
            respond(await work(self))
        except Exception as error:
            respond(error)
