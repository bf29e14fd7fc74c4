"""Puts the controller together: gateway, API, scheduler and ledger writer in one loop, and their orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import uvicorn

from fleetstart.controller.access.api import AccessApi
from fleetstart.controller.access.audit import AuditLog
from fleetstart.controller.access.door import Door, is_loopback
from fleetstart.controller.access.sealing import Sealer
from fleetstart.controller.access.vault import Vault, VaultClosed
from fleetstart.controller.api import Api, Services
from fleetstart.controller.billing.api import BillingApi
from fleetstart.controller.billing.archive import Archive
from fleetstart.controller.billing.compactor import Compactor
from fleetstart.controller.billing.reader import LedgerReader
from fleetstart.controller.billing.watch import BillingWatch
from fleetstart.controller.checkpoints import Checkpoints
from fleetstart.controller.config import Config, ConfigError
from fleetstart.controller.cors import Cors
from fleetstart.controller.gateway import Gateway
from fleetstart.controller.history import History
from fleetstart.controller.invocations.assembly import InvocationParts, assemble
from fleetstart.controller.journal import Journal
from fleetstart.controller.learner import Learner
from fleetstart.controller.ledger import LedgerWriter
from fleetstart.controller.objects import ObjectStore
from fleetstart.controller.registry import Registry
from fleetstart.controller.reporter import Reporter
from fleetstart.controller.responses import Receive, Scope, Send
from fleetstart.controller.rollouts import Rollouts
from fleetstart.controller.scheduler import Scheduler
from fleetstart.controller.seeing.api import SeeingApi
from fleetstart.controller.seeing.calls import Calls
from fleetstart.controller.seeing.entrance import Entrance
from fleetstart.controller.seeing.notable import Notable
from fleetstart.controller.seeing.process import LoopLag, Self
from fleetstart.controller.state import REDIS_DOWN, State, connect
from fleetstart.controller.target import PREFIX
from fleetstart.controller.view import View
from fleetstart.runtime.contract.tasks import end_tasks

if TYPE_CHECKING:
    from fleetstart.controller.seeing.otlp import TraceExport

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
BACKLOG = 1024
RESTART_S = 0.5
FIRST_READ_S = 1.0
"""How long the door stays shut for the first reading of Redis; without Redis it opens all the same, and says so."""
FLUSH_S = 3.0
"""How long the last ledger rows may take on the way out; what is still unwritten then stays in the journal."""


def open_store(where: str) -> ObjectStore:
    if where.startswith("s3://"):
        from fleetstart.controller.s3_store import S3Store

        bucket, _, prefix = where.removeprefix("s3://").partition("/")
        return S3Store(bucket, prefix)
    from fleetstart.controller.folder_store import FolderStore

    return FolderStore(Path(where))


def _trace_export(endpoint: str) -> TraceExport | None:
    """Errors: ConfigError if it cannot be had."""
    if not endpoint:
        return None
    try:
        from fleetstart.controller.seeing.otlp import TraceExport  # late: nobody else pays for it
    except ImportError as error:
        raise ConfigError(
            f"spans shall go to {endpoint}, and {error.name} is not installed: pip install 'fleetstart[otel]'"
        ) from error
    return TraceExport(endpoint)


def open_vault(config: Config) -> Vault:
    """Errors: ConfigError."""
    try:
        return Vault(config.home, config.master_key)
    except VaultClosed as error:
        raise ConfigError(f"{error.message}; {error.hint}") from error


class Server(uvicorn.Server):
    """uvicorn, with signals left to us: it would end the process before the ledger is written."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Controller:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.gateway_id = "gw-" + secrets.token_hex(6)
        self.view = View()
        self._client = connect(config.redis_url)
        self.state = State(self._client, self.view)
        self._journal = Journal(config.home / "journal", self.gateway_id)
        self.ledger = LedgerWriter(self._client, self._journal)
        vault = open_vault(config)
        self.scheduler = Scheduler(self.gateway_id, self.state, self.ledger, Sealer(self.view, vault))
        self.learner = Learner(self.state, lambda: self.scheduler.fence)
        self.reporter = Reporter(self.state)
        self.billing = BillingWatch(
            self._client, self.view, unwritten=lambda: self.ledger.unwritten, fence=lambda: self.scheduler.fence
        )
        self.ledger.on_row(self.billing.note)
        self.gateway = Gateway(
            self.gateway_id,
            self.state,
            self.ledger,
            self.billing,
            max_body_bytes=config.max_body_bytes,
            demand=self.reporter.demand,
            freed=self.reporter.freed,
        )
        self.reporter.gateway = self.gateway
        self._stopping = asyncio.Event()
        store = open_store(config.store)
        registry = Registry(self.state, store)
        self.checkpoints = Checkpoints(store, registry)
        archive = Archive(store)
        reader = LedgerReader(self._client, archive)
        self.compactor = Compactor(
            self._client, archive, reader, lambda: self.scheduler.fence, segment_rows=config.segment_rows
        )
        rollouts = Rollouts(self.state, registry, self.scheduler)
        billing = BillingApi(self._client, reader, self.billing, self.view)
        self.calls = Calls()
        lag = LoopLag()
        self._traces = _trace_export(config.otlp_endpoint)
        seeing = SeeingApi(
            self._client,
            reader,
            self.view,
            calls=self.calls,
            lag=lag,
            process=Self(
                unwritten=lambda: self.ledger.pending,
                leads=lambda: bool(self.scheduler.fence),
                redis=lambda: self.view.redis,
            ),
            budgets=billing.shown,
            extra=self._traces.families if self._traces is not None else lambda: (),
        )
        audit = AuditLog(self._client, store, lambda: self.scheduler.fence)
        self._listener = _listener(config)
        self._loopback = is_loopback(self._listener.getsockname()[0])
        self._parts: tuple[Part, ...] = (
            self.state,
            self.scheduler,
            rollouts,
            self.learner,
            self.reporter,
            self.ledger,
            self.checkpoints,
            self.billing,
            self.compactor,
            lag,
            audit,
        )
        history = History(self._client, reader)
        self.invocations: InvocationParts = assemble(
            config, self.gateway_id, self._client, self.view, store, self.gateway, history, self._stopping,
            fence=lambda: self.scheduler.fence,
        )  # fmt: skip
        self._parts += self.invocations.parts
        services = Services(
            config=config,
            gateway=self.gateway_id,
            view=self.view,
            registry=registry,
            store=store,
            checkpoints=self.checkpoints,
            history=history,
            billing=billing,
            seeing=seeing,
            invocations=self.invocations.api,
            access=AccessApi(self.state, audit, vault),
            stopping=self._stopping,
        )
        self._api = Api(services).app
        self._door = Door(self._behind_door, self.view, audit, loopback=self._loopback)
        self._functions = Cors(self.view, self._door)  # outside: browsers ask without a key whether they may show one
        self._server = Server(
            uvicorn.Config(
                Entrance(self.asgi, refused=self.calls.refused, sample=self._traces is not None),
                http="httptools",
                ws="websockets-sansio",
                ws_max_size=config.max_body_bytes,
                ws_per_message_deflate=False,
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=max(1, round(config.drain_s)),
            )
        )

    async def asgi(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and scope["path"].startswith(PREFIX):
            await self._functions(scope, receive, send)
        else:
            await self._door(scope, receive, send)

    async def _behind_door(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(PREFIX):
            await self.invocations.layer(scope, receive, send)
        else:
            await self._api(scope, receive, send)  # starlette refuses WebSockets that have no route

    def stop(self) -> None:
        """Stops accepting; `run` returns when calls have ended, or had their time."""
        self._stopping.set()
        self._server.should_exit = True

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        refusal: ConfigError | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError, RuntimeError):  # in a thread, for tests: signals are the main's
                loop.add_signal_handler(number, self.stop)
        self.ledger.recover()
        self.ledger.on_trace(self.calls.ended)  # from now on: what others had answered, they had counted
        self.ledger.on_trace(Notable().ended)
        if self._traces is not None:
            self.ledger.on_trace(self._traces.ended)
        log.info("controller serves", extra={"url": self.config.url, "gateway": self.gateway_id})
        try:
            async with asyncio.TaskGroup() as group:
                background = [group.create_task(_keep_running(part)) for part in self._parts]
                await self._first_read()
                refusal = self._lack_of_keys()
                if refusal is None:
                    await self._server.serve(sockets=[self._listener])
                await self.invocations.hand_back()
                await self._close()
                await end_tasks(background)
        finally:
            await self.invocations.close()
            await self.gateway.close()
            await self._client.aclose()
            self._journal.close()
            if self._traces is not None:
                await asyncio.to_thread(self._traces.close)
            self._listener.close()
        if refusal is not None:
            raise refusal

    async def _first_read(self) -> None:
        """Callers wait in the socket's backlog meanwhile: better than an answer from a view that knows nothing."""
        read = asyncio.Event()
        self.view.on_change(read.set)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_READ_S):
                await read.wait()
                await self.billing.known.wait()

    def _lack_of_keys(self) -> ConfigError | None:
        """Others than this machine could call, and nobody would ask them who they are."""
        if self._loopback or not self.view.synced or self.view.access.locked:
            return None
        return ConfigError(
            f"{self._listener.getsockname()[0]} is reached by other machines, and there are no API keys: "
            "start on 127.0.0.1 first (`fs up`), run `fs key create admin --scope admin`, and start again"
        )

    async def _close(self) -> None:
        try:
            async with asyncio.timeout(FLUSH_S):
                await self.ledger.flush()
                await self.scheduler.release()
                await self.reporter.withdraw()
        except REDIS_DOWN as error:
            log.error("ledger rows stay in the journal", extra={"rows": self.ledger.pending, "error": str(error)})


class Part(Protocol):
    async def run(self) -> None: ...


async def _keep_running(part: Part) -> None:
    """A bug in one part must not take the door down with it: calls of hot functions need none of them."""
    while True:
        try:
            await part.run()
        except Exception:
            log.exception("a part of the controller failed and is started again", extra={"part": type(part).__name__})
            await asyncio.sleep(RESTART_S)


def _listener(config: Config) -> socket.socket:
    """The inherited socket, or one of our own."""
    if config.listen_fd is not None:
        inherited = socket.socket(fileno=config.listen_fd)
        inherited.setblocking(False)
        return inherited
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    created = socket.create_server((config.host, config.port), family=family, backlog=BACKLOG)
    return socket.socket(fileno=created.detach())  # knows its protocol, as asyncio asks before it sets TCP_NODELAY
