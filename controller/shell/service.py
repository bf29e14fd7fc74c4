"""`fs shell` in the controller: a WebSocket that orders a worker of its own, relays frames to it, and ends it.

The worker is a fresh one in the function's environment (`runtime.worker` has the shell), ordered through Redis like any
other, and reached at its endpoint with its token. Its order belongs to the session and is withdrawn when that ends. If
the controller is killed, the worker ends with its connection, and any other controller withdraws the order. An open
session's frames are relayed by `session`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from urllib.parse import parse_qs

import aiohttp
import msgspec

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import (
    FleetError,
    InvalidInput,
    NotFound,
    RateLimited,
    StartFailed,
    Unavailable,
    WorkerLost,
    error_from,
)
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import LIVE, FunctionName, Version, WorkerId, new_invocation_id, new_worker_id
from fleetstart.runtime.contract.node.orders import FINAL, WorkerOrder, WorkerStatus
from fleetstart.runtime.contract.node.reports import NodeReport
from fleetstart.runtime.contract.node.shell import FRAME_MAX_BYTES, IDLE_MOST_S, IDLE_S
from fleetstart.runtime.contract.sizes import MIB
from fleetstart.runtime.contract.worker_headers import TOKEN_HEADER

from ..auth.authorize import Caller
from ..gateway.node_links import NodeLinks
from ..gateway.websocket_session import CLOSE_S
from ..gateway.websockets import HEARTBEAT_S
from ..http.asgi import Receive, Scope, Send
from ..http.headers import valid_request_id
from ..http.json_api import now_unix_ms
from ..http.request_body import header
from ..http.scope import API_CALLER
from ..http.websocket import reject_handshake
from ..planner.constraints import admits, constraints_of, unmet_constraint
from ..scheduler.volume_mounts import with_mounts
from ..state.records import VersionKey, VersionRecord
from ..state.redis_client import REDIS_ERRORS
from ..state.sync import StateSync
from ..state.traffic import version_of_alias
from .session import ShellSession

log = logging.getLogger(__name__)

SWEEP_S = 2.0
OPEN_MAX = 8
"""Open shells of one function, over all gateways: each takes a worker's memory, and no quota counts it."""
ANSWER_S = 10.0
"""Added to the function's `start_timeout_s`, for orders and statuses to travel."""


class ShellService:
    """ASGI app of the shell route. In the background it withdraws the orders of sessions whose controller died."""

    def __init__(self, state: StateSync, links: NodeLinks, seal: Callable[[WorkerOrder], WorkerOrder]) -> None:
        self._state = state
        self._links = links
        self._view = state.view
        self._seal = seal
        self._sessions: dict[WorkerId, asyncio.Event] = {}
        """Set when the worker's status changes."""
        self._view.on_shell(self._on_status)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            with contextlib.suppress(*REDIS_ERRORS):
                for order in self._abandoned(time.monotonic_ns()):
                    await self._withdraw(order)

    def _abandoned(self, now_ns: int) -> list[WorkerOrder]:
        view = self._view
        return [
            order
            for worker, order in view.shell_orders.items()
            if worker not in self._sessions
            and (
                ((status := view.shell_statuses.get(worker)) is not None and status.state in FINAL)
                or view.worker_lost(worker, order.node, order.epoch, now_ns)
            )
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        request_id = valid_request_id(header(scope, b"x-request-id")) or new_invocation_id()
        try:
            idle_s = _idle_s(scope)
            record = await self._version(scope)
            order = self._order(record)
            async with self._ordered(order), aiohttp.ClientSession() as http:
                await self._serve(order, http, scope, receive, send, idle_s)
        except FleetError as refusal:
            await reject_handshake(send, refusal, request_id)
        except REDIS_ERRORS as error:
            log.warning("no shell without redis", extra={"error": str(error)})
            await reject_handshake(send, Unavailable("Redis does not answer, so no worker can be ordered"), request_id)

    async def _serve(
        self,
        order: WorkerOrder,
        http: aiohttp.ClientSession,
        scope: Scope,
        receive: Receive,
        send: Send,
        idle_s: float,
    ) -> None:
        """Errors: FleetError, as long as the handshake has no answer."""
        first = asyncio.ensure_future(receive())
        opening = asyncio.ensure_future(self._opened(order, http))
        try:
            await asyncio.wait({first, opening}, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                return  # the client has disconnected
            session = ShellSession(
                upstream=opening.result(),
                receive=receive,
                send=send,
                idle_s=idle_s,
                end_reason=lambda: self._end_reason(order, scope.get(API_CALLER)),
                exit_reason=lambda: self._exit_reason(order),
            )
            log.info("shell opened", extra={"worker": order.worker, "function": order.spec.name, "node": order.node})
            await send({"type": "websocket.accept"})
            await session.run(first)
        finally:
            first.cancel()
            opening.cancel()
            await asyncio.gather(first, opening, return_exceptions=True)

    # ── its worker ─────────────────────────────────────────────────────────────────────────────────

    async def _version(self, scope: Scope) -> VersionRecord:
        """Errors: NotFound, Unavailable."""
        view, name = self._view, FunctionName(scope["path_params"]["name"])
        if not view.synced:
            raise Unavailable("functions are not known yet, Redis was not read", retry_after_s=1)
        function = view.functions.get(name)
        if function is None:
            raise NotFound(f"function {name[:127]} does not exist", hint="`fs ls` lists what does")
        wanted = _query(scope, "version") or LIVE
        is_number = wanted.isascii() and wanted.isdecimal() and len(wanted) < 10
        number = Version(int(wanted)) if is_number else version_of_alias(function, wanted)
        record = await self._state.version(VersionKey(name, number))
        if record is None:
            raise NotFound(f"function {name} has no version {number}", hint=f"`fs versions {name}` lists them")
        return record

    def _order(self, record: VersionRecord) -> WorkerOrder:
        """Errors: Unavailable, RateLimited."""
        name = record.spec.name
        if sum(order.spec.name == name for order in self._view.shell_orders.values()) >= OPEN_MAX:
            raise RateLimited(f"{OPEN_MAX} shells of {name} are open, the maximum", retry_after_s=1)
        now_ns, unix_ns = time.monotonic_ns(), time.time_ns()
        nodes = [seen.report for seen in self._view.nodes.values() if not seen.lost(now_ns)]
        node = select_node(record.spec, nodes)
        order = WorkerOrder(
            worker=new_worker_id(),
            node=node.node,
            epoch=node.epoch,
            version=record.version,
            spec=record.spec,
            ordered_unix_ns=unix_ns,
            decided_unix_ns=unix_ns,
            shell=True,
        )
        return with_mounts(self._view, self._seal(order))

    @asynccontextmanager
    async def _ordered(self, order: WorkerOrder) -> AsyncIterator[None]:
        self._sessions[order.worker] = asyncio.Event()
        try:
            await self._write(order)
            yield
        finally:
            try:
                await self._withdraw(order)
            except REDIS_ERRORS as error:
                log.warning("a shell's order is withdrawn later", extra={"worker": order.worker, "error": str(error)})
            del self._sessions[order.worker]  # from now on any controller may withdraw it

    async def _write(self, order: WorkerOrder) -> None:
        """Writes the order, without the scheduler's fence: it belongs to the session. Errors: REDIS_ERRORS."""
        raw = msgspec.json.encode(order)
        async with self._state.writes, self._state.client.pipeline(transaction=False) as pipe:
            pipe.hset(keys.desired(order.node), order.worker, raw)
            pipe.publish(keys.events_desired(order.node), raw)
            await pipe.execute()
            self._view.put_order(order)

    async def _withdraw(self, order: WorkerOrder) -> None:
        """Withdraws the order; its node ends the worker within a second. Idempotent. Errors: REDIS_ERRORS."""
        async with self._state.writes:
            await self._state.client.hdel(keys.desired(order.node), order.worker)
            self._view.drop_order(order.worker)

    def _on_status(self, status: WorkerStatus) -> None:
        news = self._sessions.get(status.worker)
        if news is not None:
            news.set()

    async def _opened(self, order: WorkerOrder, http: aiohttp.ClientSession) -> aiohttp.ClientWebSocketResponse:
        """Errors: FleetError."""
        limit_s = order.spec.start_timeout_s + ANSWER_S
        try:
            async with asyncio.timeout(limit_s):
                status = await self._ready(order)
                url, tls = self._links.target(status, "/")
                return await http.ws_connect(
                    url,
                    headers={TOKEN_HEADER: status.token},
                    max_msg_size=FRAME_MAX_BYTES,
                    heartbeat=HEARTBEAT_S,
                    timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),
                    autoclose=False,
                    **tls,
                )
        except TimeoutError as error:
            raise StartFailed(f"node {order.node} had no shell ready after {limit_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise WorkerLost(
                f"node {order.node} is not reached: {error}", hint="`fs nodes` shows those there are"
            ) from (error)

    async def _ready(self, order: WorkerOrder) -> WorkerStatus:
        news = self._sessions[order.worker]
        while True:
            news.clear()
            status = self._view.shell_statuses.get(order.worker)
            if status is not None and status.state == "ready":
                return status
            if status is not None and status.state in FINAL:
                if status.error is not None:
                    raise error_from(status.error)
                raise Unavailable(f"node {order.node} was restarted: try again", retry_after_s=1)
            await news.wait()

    # ── its end ────────────────────────────────────────────────────────────────────────────────────

    def _end_reason(self, order: WorkerOrder, caller: object) -> str:
        """Why the session must end; empty while it need not."""
        view = self._view
        if view.synced and order.spec.name not in view.functions:
            return f"function {order.spec.name} was removed"
        if view.worker_lost(order.worker, order.node, order.epoch, time.monotonic_ns()):
            return f"node {order.node} was lost"
        if isinstance(caller, Caller) and not caller.still_valid(view.access, now_unix_ms()):
            record = view.access.keys.get(caller.name)
            revoked = record is None or record.revoked_unix_ms
            return f"key {caller.name} {'was revoked' if revoked else 'has expired'}"
        return ""

    def _exit_reason(self, order: WorkerOrder) -> str | None:
        """Why the worker ended; None while that is unknown, and it may be running."""
        status = self._view.shell_statuses.get(order.worker)
        if status is None or status.state not in FINAL:
            return None
        return status.error.message if status.error is not None else f"node {order.node} ended it"


def select_node(spec: FunctionSpec, nodes: Iterable[NodeReport]) -> NodeReport:
    """Selects, of the nodes that meet the function's constraints, that with most free memory. Errors: Unavailable."""
    known = list(nodes)
    if not known:
        raise Unavailable("there is no node to run a shell on", hint="`fs nodes` lists them; `fs up` starts one")
    wanted = constraints_of(spec)
    why, advice = unmet_constraint(wanted, known)
    if why:
        raise Unavailable(f"function {spec.name}: {why}", hint=advice)
    known = [node for node in known if admits(wanted, node)]
    able = [node for node in known if spec.pool in node.profiles]
    if not able:
        names = ", ".join(sorted(node.node for node in known))
        raise Unavailable(f"no node has profile {spec.pool} ready, neither of {names}", retry_after_s=1)
    roomiest = max(able, key=lambda node: (node.memory_bytes - node.memory_used_bytes, node.node))
    if all(node.memory_bytes < spec.memory_bytes for node in able):
        raise Unavailable(
            f"no node can hold a worker of {spec.name}: it needs {spec.memory_bytes // MIB} MiB, and the roomiest, "
            f"{roomiest.node}, has {roomiest.memory_bytes // MIB} MiB in all"
        )
    return roomiest


def _query(scope: Scope, name: str) -> str:
    query: bytes = scope["query_string"]
    return parse_qs(query.decode("latin-1")).get(name, [""])[-1]


def _idle_s(scope: Scope) -> float:
    """Errors: InvalidInput."""
    text = _query(scope, "idle_s")
    try:
        seconds = float(text) if text else IDLE_S
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds <= IDLE_MOST_S:
        raise InvalidInput(f"idle_s={text[:40]!r} must be 1 to {IDLE_MOST_S:g} seconds")
    return seconds
