"""Reconciliation, one step of the scheduler: the view and `now` in, writes out. Pure.

For every version that is live, ordered or called: `autoscaler` computes the desired workers, `quotas` cuts them
to what the project may run, `worker_pool` decides about the difference, and the planner places new ones, as single
workers or pipelines. `loop` carries the writes out.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import msgspec

from fleetstart.runtime.contract.errors import StartFailed
from fleetstart.runtime.contract.function.names import project_of
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder
from fleetstart.runtime.contract.node.reports import FunctionLoad

from ..planner.selection import SIZE_USUAL
from ..state.records import Failure, VersionKey, VersionRecord, is_helper
from ..state.traffic import scale_of
from ..state.view import View
from .agenda import Rest, all_versions, called_versions, start_order
from .autoscaler import consolidation_count
from .demand import Demand, waited_s_of
from .live_cluster import FleetCache, LiveCluster, PlanningContext
from .pipelines import consolidation_orders, update_pipelines
from .quotas.limits import ObservedVersion, ProjectLimits, limited_projects
from .start_orders import NEW_IDS, IdSource, orders_of, plan_start, request_of
from .step import Step
from .worker_pool import FAILURES_TO_BREAK, Decision, Member, broken, decide

NO_LOAD = FunctionLoad(0, 0)


class Reconciler:
    """Reconciles versions. Owns the autoscaling windows and the ages of orders, the scheduler's only state: losing it
    costs some warm workers, and gives starts that never end more time."""

    def __init__(self, ids: IdSource = NEW_IDS) -> None:
        self._demand = Demand()
        self._seen: dict[WorkerId, tuple[WorkerOrder, int]] = {}
        """Each worker's last order but for its sources, and when it was first seen, on a monotonic clock."""
        self._active: set[VersionKey] = set()
        """Versions of which something is expected."""
        self._live: LiveCluster | None = None
        self._fleet = FleetCache()
        self._ids = ids

    def step(self, view: View, *, now_ns: int, now_unix_ns: int, keys: Collection[VersionKey] | None = None) -> Step:
        """The writes for these versions, or for all. Those with the oldest waiting calls come first."""
        loads = view.loads()
        planning = self._planning(view, now_ns, now_unix_ns)
        looked_at = all_versions(view) if keys is None else self._with_their_projects(view, keys)
        parts: dict[VersionKey, Step] = {}
        observed = []
        for key in sorted(looked_at, key=lambda key: start_order(key, loads)):
            part = parts[key] = Step()
            orders = list(view.orders_of(key).values())
            try:
                one = self._observed(part, view, key, loads.get(str(key), NO_LOAD), orders, now_ns, now_unix_ns)
            except Exception as error:  # one version's fault must not stop the others'
                one, parts[key] = None, _faulty(view, key, error, now_unix_ns // 1_000_000)
            if one is not None:
                observed.append(one)
        limits = ProjectLimits(view, observed)
        for one in observed:
            part = Step()
            try:
                self._version(part, view, planning, limits, one, now_ns, now_unix_ns)
            except Exception as error:
                part = _faulty(view, one.key, error, now_unix_ns // 1_000_000)
            parts[one.key].add(part)
        step = Step()
        for key, part in parts.items():
            part.rests[key] = self._rest(view, key, loads.get(str(key), NO_LOAD), part, now_ns, now_unix_ns)
            step.add(part)
        for worker in self._seen.keys() - view.orders.keys() if len(self._seen) > len(view.orders) else ():
            del self._seen[worker]
        for order in step.orders:
            self._first_seen_ns(order, now_ns)
        return step

    def _planning(self, view: View, now_ns: int, now_unix_ns: int) -> PlanningContext:
        if self._live is None or self._live.view is not view:
            self._live = LiveCluster(view)
        return PlanningContext(self._live, self._fleet, now_ns, now_unix_ns)

    def _with_their_projects(self, view: View, keys: Collection[VersionKey]) -> set[VersionKey]:
        """These versions, and those that share a quota with one of them: what one has, another cannot."""
        limited = limited_projects(view)
        asked = {project for key in keys if (project := project_of(key.name)) in limited} if limited else ()
        if not asked:
            return set(keys)
        there = {*view.ordered_versions(), *self._active, *called_versions(view)}
        return {*keys, *(key for key in there if project_of(key.name) in asked)}

    def _rest(
        self, view: View, key: VersionKey, load: FunctionLoad, part: Step, now_ns: int, now_unix_ns: int
    ) -> tuple[Rest, int | None]:
        """What is to be expected of a version after its part of a step, and when it must be looked at again."""
        orders, window = view.orders_of(key).values(), self._demand.window(key)
        writes = part.orders or part.deleted_orders or part.failures or part.unplaced or part.faults
        function = view.functions.get(key.name)
        tried = function is not None and function.rollout is not None and function.rollout.version == key.version
        rest: Rest = "inert"
        if writes or tried or load.queued or any(_moves(view, order) for order in orders):
            rest = "moving"
        elif orders or load.running or (window is not None and not window.empty):
            rest = "steady"
        again_ns = None
        if part.again_unix_ms is not None:
            again_ns = now_ns + part.again_unix_ms * 1_000_000 - now_unix_ns
        if rest == "inert" and again_ns is None:
            self._demand.forget(key)
            self._active.discard(key)
        else:
            self._active.add(key)
        return rest, again_ns

    def _observed(
        self,
        step: Step,
        view: View,
        key: VersionKey,
        load: FunctionLoad,
        orders: list[WorkerOrder],
        now_ns: int,
        now_unix_ns: int,
    ) -> ObservedVersion | None:
        """The version's workers and how many it wants; None if nothing is known of it."""
        record = view.versions.get(key)
        spec = record.spec if record else (orders[0].spec if orders else None)
        if spec is None:
            return None
        function = view.functions.get(key.name)
        if function is None and key.name in view.unreadable.names("function"):
            return None  # what is wanted of it is not known: its workers stay as they are
        if function is not None and function.scaled is not None:
            spec = msgspec.structs.replace(spec, scale=scale_of(function, spec))
        orders = _leave_draining(step, view, orders, now_unix_ns)
        members = [self._member(view, order, load, now_ns) for order in orders]
        needed, desired = self._demand.workers(view, key, spec, load, members, view.failures.get(key), now_ns)
        return ObservedVersion(
            key=key,
            record=record,
            spec=spec,
            load=load,
            orders=orders,
            members=members,
            needed=min(needed, desired),
            desired=desired,
        )

    def _version(
        self,
        step: Step,
        view: View,
        planning: PlanningContext,
        limits: ProjectLimits,
        one: ObservedVersion,
        now_ns: int,
        now_unix_ns: int,
    ) -> None:
        key, spec, record, load, members = one.key, one.spec, one.record, one.load, one.members
        decision = decide(
            spec=spec,
            desired=limits.granted(one),
            members=members,
            failure=view.failures.get(key),
            now_unix_ms=now_unix_ns // 1_000_000,
            standby_s=spec.scale.standby_s if self._demand.window(key) is not None and spec.llm is not None else 0.0,
        )
        limits.started(one, len(decision.wake))
        start = limits.room_for(one, decision.start)
        if start != decision.start:
            decision = replace(decision, start=start)
        if reason := limits.shortage(one):
            step.unplaced[key] = reason
        self._write(step, key, one.orders, decision, now_unix_ns)
        helped = self._tend_pipelines(step, view, spec, one.orders, members, start, now_unix_ns)
        limits.started(one, min(helped, start))
        window = self._demand.window(key)
        falls_ns = window.falls_ns(spec.scale) if window is not None else None
        if falls_ns is not None:
            step.soonest((now_unix_ns + falls_ns - now_ns) // 1_000_000 + 1)
        wait_ns = self._demand.gathering_ns(view, one, start - helped, now_ns)
        if wait_ns:
            step.soonest((now_unix_ns + wait_ns) // 1_000_000 + 1)
        elif record is not None and start > helped:
            waited_s = waited_s_of(load, members, now_unix_ns)
            begun = len(step.orders)
            placed = self._start(step, view, planning, key, record, start - helped, waited_s, now_ns, now_unix_ns)
            limits.started(one, placed)
            step.orders[begun:] = [msgspec.structs.replace(order, cause=load.oldest) for order in step.orders[begun:]]

    def _member(self, view: View, order: WorkerOrder, load: FunctionLoad, now_ns: int) -> Member:
        status = view.statuses.get(order.worker) or view.ended.get(order.worker)
        return Member(
            worker=order.worker,
            wanted=order.wanted,
            ordered_unix_ms=order.ordered_unix_ns // 1_000_000,
            age_ms=(now_ns - self._first_seen_ns(order, now_ns)) // 1_000_000,
            state=status.state if status else None,
            # Since the last read its node may have come back.
            lost=view.worker_lost(order.worker, order.node, order.epoch, view.synced_ns),
            served=order.worker in view.was_ready or bool(status and (status.endpoint or status.served)),
            reported_unix_ms=status.changed_unix_ns // 1_000_000 if status else 0,
            ready_unix_ms=status.changed_unix_ns // 1_000_000 if status and status.state == "ready" else 0,
            running=load.per_worker.get(order.worker, 0),
            error=status.error if status else None,
            helper=is_helper(order, status),
            becomes_whole=order.grow,
            staged=order.stage is not None,
        )

    def _first_seen_ns(self, order: WorkerOrder, now_ns: int) -> int:
        """When this scheduler first saw the order as it is, by a clock that does not step."""
        known = self._seen.get(order.worker)
        if known is None or not (known[0].ordered_unix_ns == order.ordered_unix_ns or _same_work(known[0], order)):
            known = self._seen[order.worker] = (order, now_ns)
        return known[1]

    def _write(
        self, step: Step, key: VersionKey, orders: list[WorkerOrder], decision: Decision, now_unix_ns: int
    ) -> None:
        by_worker = {order.worker: order for order in orders}
        if decision.failure is not None or decision.clear_failure:
            step.failures.append((key, decision.failure))
        for worker in decision.drain:
            order = by_worker[worker]
            step.orders.append(order.changed(now_unix_ns, wanted="drain"))
        for worker in decision.stand_by:
            step.orders.append(by_worker[worker].changed(now_unix_ns, wanted="standby"))
        for worker in decision.wake:
            step.orders.append(by_worker[worker].changed(now_unix_ns, wanted="run"))
        step.deleted_orders.extend(by_worker[worker] for worker in decision.delete_orders)
        step.impossible.extend(decision.impossible)
        step.soonest(decision.again_unix_ms)

    def _tend_pipelines(
        self,
        step: Step,
        view: View,
        spec: FunctionSpec,
        orders: list[WorkerOrder],
        members: list[Member],
        missing: int,
        now_unix_ns: int,
    ) -> int:
        """Updates the version's pipeline orders after the scaling decision, so that all stages stop together. Returns
        how many missing workers are covered by stages that become whole."""
        if all(order.stage is None for order in orders):
            return 0
        changed = {order.worker: order for order in step.orders}
        gone = {order.worker for order in step.deleted_orders}
        left = [changed.get(order.worker, order) for order in orders if order.worker not in gone]
        statuses = {order.worker: status for order in left if (status := view.statuses.get(order.worker)) is not None}
        lost = frozenset(member.worker for member in members if member.lost)
        new = consolidation_orders(
            left, statuses, lost, missing, memory_bytes=spec.memory_bytes, now_unix_ns=now_unix_ns
        )
        grow = {order.worker: order for order in new}
        left = [grow.get(order.worker, order) for order in left]
        limit_ms = spec.start_timeout_s * 1000
        overdue = frozenset(m.worker for m in members if m.age_ms >= limit_ms and m.worker not in changed.keys() | grow)
        tended = update_pipelines(left, statuses, lost, now_unix_ns, overdue)
        step.orders.extend({order.worker: order for order in (*new, *tended)}.values())
        return len(new)

    def _start(
        self,
        step: Step,
        view: View,
        planning: PlanningContext,
        key: VersionKey,
        record: VersionRecord,
        count: int,
        waited_s: float,
        now_ns: int,
        now_unix_ns: int,
    ) -> int:
        """Orders new workers, single or in groups of which as many become whole as are needed (HydraServe section
        6.1). Returns how many were placed."""
        missing = count
        while missing > 0:
            request = request_of(
                view, key, record, min(missing, SIZE_USUAL), missing=missing, others=planning.others, waited_s=waited_s
            )
            chosen = plan_start(request, planning.cluster, now_ns / 1e9)
            if chosen.error is not None:
                step.unplaced[key] = chosen.error
                step.orders.extend(_giving_way(view, key, now_unix_ns))
                if chosen.wait_s:
                    step.soonest(math.ceil(now_unix_ns / 1e6 + chosen.wait_s * 1000))
                break
            full = sum(stage.full for stage in chosen.stages)
            grow = full
            if chosen.together:
                grow = consolidation_count(group=len(chosen.stages), full=full, needed=missing, others=0)
            orders = orders_of(chosen, record, self._ids, grow=grow, now_unix_ns=now_unix_ns)
            planning.reserve(chosen, orders, request)
            step.orders.extend(orders)
            decided = msgspec.structs.replace(chosen, decided_unix_ms=now_unix_ns // 1_000_000)
            step.plans.update({order.worker: decided for order in orders})
            missing -= grow
        return count - missing


def _giving_way(view: View, key: VersionKey, now_unix_ns: int) -> list[WorkerOrder]:
    """Orders that end the standby of workers of other versions that nobody calls, as a start found no place: what is
    left of them, and the weights that they keep in memory, make room for it."""
    loads = view.loads()
    return [
        order.changed(now_unix_ns, wanted="drain")
        for order in view.orders.values()
        if order.wanted == "standby"
        and (other := VersionKey(order.spec.name, order.version)) != key
        and not loads.get(str(other), NO_LOAD).queued
    ]


def _faulty(view: View, key: VersionKey, error: Exception, now_unix_ms: int) -> Step:
    """The step of a version that could not be decided about: its calls get the reason, as after failed starts."""
    step = Step(faults={key: error})
    info = StartFailed(
        f"function {key.name}: version {key.version} could not be scheduled: {type(error).__name__}: {error}"[:500],
        hint="other functions go on; the log of the controller that schedules has the traceback",
    ).info()
    known = view.failures.get(key)
    if known is None or known.error != info or not broken(known, now_unix_ms):
        count = max(FAILURES_TO_BREAK, known.count if known is not None else 0)
        step.failures.append((key, Failure(count=count, last_unix_ms=now_unix_ms, error=info)))
    return step


def _same_work(known: WorkerOrder, order: WorkerOrder) -> bool:
    """True if an order asks for what an earlier one did: other sources give a start no more time."""
    changed = msgspec.structs.replace(
        known, sources=order.sources, pulls=order.pulls, ordered_unix_ns=order.ordered_unix_ns
    )
    return changed == order


def _moves(view: View, order: WorkerOrder) -> bool:
    """True if something is to be expected of a worker: it starts or ends."""
    status = view.statuses.get(order.worker)
    if order.wanted == "standby" and status is not None and status.state == "standby":
        return False
    return order.wanted != "run" or status is None or status.state != "ready" or order.stage is not None


def _leave_draining(step: Step, view: View, orders: list[WorkerOrder], now_unix_ns: int) -> list[WorkerOrder]:
    """Drains the workers on nodes that drain, and whole pipelines with a stage there. Returns the orders as changed."""
    if not any(order.node in view.draining for order in orders):
        return orders
    pipelines = {order.stage.pipeline for order in orders if order.stage is not None and order.node in view.draining}
    left = []
    for order in orders:
        leaves = order.node in view.draining or (order.stage is not None and order.stage.pipeline in pipelines)
        # The helpers of a pipeline follow its first stage, which still has calls.
        if leaves and order.wanted != "drain" and (order.stage is None or order.stage.index == 0):
            order = order.changed(now_unix_ns, wanted="drain")
            step.orders.append(order)
        left.append(order)
    return left
