"""What must hold when the faults are over: everything settles within a bounded time, and nothing is lost or doubled."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from fleetstart.controller.async_invocations.idempotency.silence import RENEW_S
from fleetstart.controller.state.invocation_records import Progress
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.ledger import InvocationRow, LedgerRow, PhaseRow
from fleetstart.runtime.contract.ids import FunctionName, InvocationId, NodeId
from fleetstart.runtime.contract.node.orders import WorkerOrder
from tests.simulation.monitor import SILENT_NS
from tests.simulation.weights import copies_of

SETTLED_S = 60.0
"""All leases together are shorter: 5 s of a claim or a node, 30 s until a dead gateway's calls are closed, 5 s between
two looks, 10 s of keep-alive."""
BROKEN_S = 100.0
"""More where starts have failed: a version that is given up is tried again after a minute."""
TRY_S = 1.0
OVERLOADED_S = 5.0
"""Time for which a call is sent again whose worker is expected too late for it: longer than a start takes."""
CUT_OFF_NS = SILENT_NS - round(RENEW_S * 1e9)
"""Time for which a gateway that is cut off may be silent as long as is stated: its renewal before may be that old."""


class _Function(msgspec.Struct):
    """The part of a function's record that is compared."""

    live: int


_LIVE = msgspec.json.Decoder(_Function)
_ROWS = msgspec.json.Decoder(LedgerRow)
_ORDERS = msgspec.json.Decoder(WorkerOrder)
_PROGRESS = msgspec.json.Decoder(Progress)


class Violation(Exception):
    """Something does not hold."""


async def check_end(world: Any) -> None:
    """Waits until all has settled, and checks what is left. Errors: Violation."""
    bound_s = SETTLED_S + (BROKEN_S if world.plan.failing_starts else 0.0)
    began_s = world.loop.time()
    await _settle(world, began_s + bound_s)
    await _calls_are_served(world)
    await _settle(world, world.loop.time() + bound_s)
    world.settled_s = world.loop.time() - began_s
    _rows(world)
    _keys(world)
    _jobs(world)
    _bills(world)


async def _settle(world: Any, ends_s: float) -> None:
    while next(unsettled(world), None) is not None:
        if world.loop.time() > ends_s:
            open_ends = "; ".join(unsettled(world))
            raise Violation(f"everything settles: at {world.loop.time():.3f} s there is still {open_ends}")
        await asyncio.sleep(world.plan.pace.look_s)


def unsettled(world: Any) -> Iterator[str]:
    """Open ends: what is not as it must be in the end. While there are some, the first says enough."""
    data = world.server.data.values
    controllers = [one for one in world.controllers.values() if one is not None]
    leaders = [one.id for one in controllers if one.core.scheduler.fence]
    if len(leaders) != 1:
        yield f"leaders: {leaders}"
    for one in controllers:
        if one.core.view.redis != "ok":
            yield f"{one.id} reads nothing: {one.core.view.redis}"
        elif (stale := _stale(data, one)) is not None:
            yield f"{one.id} has not read what is deployed: {stale}"
        elif dict(one.core.view.access.raw[0]) != data.get(keys.KEYS.encode(), {}):
            yield f"{one.id} has not read all keys: where the answer to a read is lost, it is asked again after 2 s"
        if not one.core.billing.known.is_set():
            yield f"{one.id} knows no prices, without which it is not open to callers"
        if one.core.ledger.pending or one.core.ledger._written:
            yield f"{one.id} has rows that are not written"
    for node in world.nodes.values():
        if node.ledger.peek(1):
            yield f"{node.name} has rows that are not written"
        if world.server.data.execute(b"EXISTS", [keys.node(node.name).encode()]) == 0:
            yield f"{node.name} has no lease: a request of before waits for its answer"
    if data.get(keys.OPEN.encode()):
        yield f"open calls: {sorted(data[keys.OPEN.encode()])[:3]}"
    ended = 0
    for name in world.clients.told.accepted:
        progress = progress_of(world, name)
        ended += progress is not None and progress.ended
    if ended < len(world.clients.told.accepted):
        yield f"{len(world.clients.told.accepted) - ended} async calls that have not ended"
    yield from _workers(world)
    yield from _copies(world)


def _stale(data: dict[bytes, Any], controller: Any) -> str | None:
    """A function of which the controller knows another version as live than Redis: where the publication of a deploy
    was lost, it reads all functions again some seconds later."""
    known = controller.core.view.functions
    for name, raw in data.get(keys.FUNCTIONS.encode(), {}).items():
        record = known.get(FunctionName(name.decode()))
        if record is None or record.live != _LIVE.decode(raw).live:
            return str(name.decode())
    return None


def _copies(world: Any) -> list[str]:
    """Kept checkpoints without their one copy, and fetches under way whose orders name nodes that are gone."""
    view = next((one.core.view for one in world.controllers.values() if one is not None), None)
    assert view is not None
    kept = sorted(
        {
            spec.weights
            for name, record in view.functions.items()
            if (spec := view.versions[name, record.live].spec).keep and spec.weights is not None
        }
    )
    copies = copies_of(world)
    found = []
    if sorted(copy.checkpoint for copy in copies) != kept:
        found.append(f"copies: {[(copy.node, copy.checkpoint[:8]) for copy in copies]}, kept: {kept}")
    for copy in copies:
        node = world.nodes.get(copy.node)
        if node is None or node.epoch != copy.epoch:
            found.append(f"the copy of {copy.checkpoint[:8]} is ordered of a node that is gone: {copy.node}")
        elif not any(one.checkpoint == copy.checkpoint and one.state == "ready" for one in node.weights.reports()):
            found.append(f"{copy.node} has no copy of {copy.checkpoint[:8]}")
    return found


def _workers(world: Any) -> list[str]:
    """Workers that should not be there, or are missing."""
    found: list[str] = []
    data = world.server.data.values
    orders = {order.worker: order for order in orders_of(world)}
    alive = {worker.order.worker for node in world.nodes.values() for worker in node.workers.values()}
    if without := alive - orders.keys():
        found.append(f"workers without an order: {sorted(without)}")
    if missing := {worker for worker, order in orders.items() if order.wanted == "run"} - alive:
        found.append(f"orders without a worker: {sorted(missing)}")
    for node in world.nodes.values():
        statuses = data.get(keys.observed(node.name).encode(), {})
        if stale := {name.decode() for name in statuses} - orders.keys():
            found.append(f"statuses without an order: {sorted(stale)}")
    view = next((one.core.view for one in world.controllers.values() if one is not None), None)
    wanted: Counter[str] = Counter()
    assert view is not None
    for name, record in view.functions.items():
        spec = view.versions[name, record.live].spec
        least = record.scaled.min if record.scaled is not None and record.scaled.min is not None else spec.scale.min
        wanted[f"{name}@{record.live}"] = least
    there = Counter(f"{order.spec.name}@{order.version}" for order in orders.values() if order.wanted == "run")
    if +there != +wanted and not world.plan.quota:
        found.append(f"ordered workers: {dict(there)} instead of {dict(+wanted)}")
    kept = {name.decode() for name in data.get(keys.KEPT.encode(), {})}
    if kept != {worker for worker, order in orders.items() if order.wanted == "run"}:
        found.append(f"kept for billing: {sorted(kept)}, ordered: {sorted(orders)}")
    return found


def orders_of(world: Any) -> list[WorkerOrder]:
    data = world.server.data.values
    raw = [value for node in world.nodes for value in data.get(keys.desired(NodeId(node)).encode(), {}).values()]
    return [_ORDERS.decode(value) for value in raw]


def progress_of(world: Any, name: str) -> Progress | None:
    record = world.server.data.values.get(keys.invocation(InvocationId(name)).encode())
    return _PROGRESS.decode(record[b"state"]) if record else None


async def _calls_are_served(world: Any) -> None:
    """Each controller serves each function, in the version that is live, and refuses revoked keys."""
    for name, controller in world.controllers.items():
        for function in world.plan.functions:
            began_s = world.loop.time()
            answer = await world.clients.call(name, function.name, b"last")
            while _is_sent_again(world, answer.body, world.loop.time() - began_s):
                await asyncio.sleep(TRY_S)
                answer = await world.clients.call(name, function.name, b"last")
            if answer.status != 200:
                raise Violation(f"calls are served in the end: {name} answered {answer.status} {answer.body[:300]!r}")
            live = controller.core.view.functions[function.name].live
            if int(answer.headers["fs-version"]) != live:
                raise Violation(f"{name} served {function.name}@{answer.headers['fs-version']}, and @{live} is live")
        for key in world.clients.told.revoked:
            if not await world.clients.try_revoked(key, name, world.plan.functions[0].name):
                raise Violation(f"a revoked key is refused: {key} passes {name} in the end")


def _is_sent_again(world: Any, body: bytes, after_s: float) -> bool:
    """True for an answer after which a call is sent again: its start failed, for the minute after which a version that
    was given up is tried again; or it was refused because its worker would come too late, until that has come."""
    if b"start_failed" in body:
        return bool(world.plan.failing_starts) and after_s < BROKEN_S
    return b'"overloaded"' in body and b"a worker is expected in" in body and after_s < OVERLOADED_S


def rows_of(world: Any) -> list[LedgerRow]:
    stream = world.server.data.values.get(keys.LEDGER.encode())
    return [_ROWS.decode(fields[1]) for fields in stream.entries] if stream is not None else []


def _rows(world: Any) -> None:
    """One row a run, and each answered call has one that says so."""
    rows = rows_of(world)
    for name, count in Counter(row.id for row in rows).items():
        if count > 1:
            world.violated(f"one row a run: {name} has {count}")
    calls = {row.id: row for row in rows if isinstance(row, InvocationRow)}
    for name, answer in world.clients.told.rows.items():
        row = calls.get(InvocationId(name))
        if row is None:
            world.violated(f"one row a run: {name} was answered by {answer.controller}, and has none")
        elif row.status != 200:
            world.violated(f"one row a run: {name} was answered with 200, and its row says {row.status} {row.error}")


def _keys(world: Any) -> None:
    """All who call with one Idempotency-Key get the answer of one run."""
    for key, answers in world.clients.told.keyed.items():
        told = len({answer.body for answer in answers}) > 1 and not world.clock_of_redis_stepped
        if told and not any(_was_silent(world, answer.headers["x-request-id"]) for answer in answers):
            world.violated(
                f"one run an idempotency key: {key} was answered with runs "
                f"{[(answer.body.decode(), answer.controller) for answer in answers]}"
            )


def _was_silent(world: Any, invocation: str) -> bool:
    """True if the call took its key from a gateway that had died, or could not reach Redis for as long as is stated."""
    holder = world.monitor.taken_over.get(invocation)
    return holder is not None and (
        not holder.alive or world.faults.cut_off_ns.get(holder.name, 0) >= CUT_OFF_NS or world.clock_of_redis_stepped
    )


def _jobs(world: Any) -> None:
    """No accepted async call is lost: each has run and has its answer, or says why it could not."""
    runs = Counter(run.body for run in world.history.runs)
    for name, told in world.clients.told.accepted.items():
        progress = progress_of(world, name)
        if progress is None:
            world.violated(f"no accepted async call is lost: {name}, accepted by {told.controller}, is not stored")
        elif progress.status == "succeeded":
            claim = progress.answer.claim if progress.answer is not None else 0
            if f"invocations/{name}/answer-{claim}" not in world.store.data:
                world.violated(f"no accepted async call is lost: the answer of {name}, claim {claim}, is gone")
            elif world.store.data[f"invocations/{name}/answer-{claim}"][0] == b"":
                world.violated(f"the answer of {name} is empty")
        elif progress.status == "expired" and any(
            fault.kind == "step clock" and fault.target == "redis" and fault.size > 3_600 for fault in world.plan.faults
        ):
            continue  # by the clock that leases are read by, its hour is over
        elif not (progress.status == "failed" and progress.error is not None):
            world.violated(f"no accepted async call is lost: {name} is {progress.status} with {progress.error}")
    del runs


def _bills(world: Any) -> None:
    """Each worker is billed for what it was kept, and its time adds up."""
    spent: Counter[str] = Counter()
    billed: Counter[str] = Counter()
    for row in rows_of(world):
        if isinstance(row, PhaseRow) and row.phase in ("idle", "execute"):
            spent[row.worker] += row.duration_ms
            if row.rate_nusd_per_gib_s:
                billed[row.worker] += row.duration_ms
    slack_ms = 4_000
    for worker, life in world.history.lives.items():
        if not life.ready_ns:
            continue
        until_ns = life.ended_ns or world.loop.now_ns
        lived_ms = (until_ns - life.ready_ns) / 1e6
        if spent[worker] > lived_ms + 2:
            world.violated(f"a worker's time adds up: {worker} lived {lived_ms:.0f} ms, its rows have {spent[worker]}")
        if life.ended_ns and not life.killed and spent[worker] < lived_ms - 2:
            world.violated(f"a worker's time adds up: {worker} lived {lived_ms:.0f} ms, its rows have {spent[worker]}")
        kept_ms = world.monitor.kept_for_ns(worker) / 1e6
        apart_ms = world.faults.cut_off_ns.get(life.order.node, 0) / 1e6
        if billed[worker] > kept_ms + slack_ms + apart_ms:
            world.violated(
                f"workers are billed for what they were kept: {worker} was kept {kept_ms:.0f} ms, and "
                f"{billed[worker]} are billed"
            )
