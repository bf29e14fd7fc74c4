"""A gateway's own memory of each version: its workers, the calls on them, and the calls that wait.

A call takes a free slot on the spot, without a task or a future; only if there is none does it wait in the queue,
and the scheduler hears of it. Slots come free when calls end, and appear when a worker's status says ready.
Nothing here waits or talks to anybody: `invoke` does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fleetstart.runtime.contract.billing.ledger import StartKind
from fleetstart.runtime.contract.billing.prices import FIRST, PriceSheet
from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.ids import InvocationId, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerStatus
from fleetstart.runtime.contract.node.reports import FunctionLoad
from fleetstart.runtime.contract.timeline import Timeline

from ...billing.apportionment import Meter
from ...state.records import VersionKey, VersionRecord
from .queue import CallQueue, ServiceTime
from .stream_resume import ResumeMarkers

BUSY_BACKOFF_NS = 20_000_000
"""How long a worker that was full (with another gateway's calls) is passed over, unless a call of ours ends there."""
SUSPECT_BACKOFF_NS = 500_000_000
"""How long one that broke a connection is passed over: by then its node has told whether it lives."""


@dataclass(slots=True, eq=False)
class Call:
    """One accepted invocation, from the door to its row."""

    id: InvocationId
    method: str
    target: str
    """Path and query as the worker shall see them."""
    headers: list[tuple[str, str]]
    body: bytes
    accepted_ns: int
    accepted_unix_ns: int
    deadline_ns: int
    queue_ends_ns: int = 0
    """Until when it waits for a worker; 0: as long as it has time at all."""
    price: PriceSheet = FIRST
    """In force when it was accepted."""
    key: str = ""
    """Name of the API key that its caller showed."""
    timeline: Timeline = field(default_factory=Timeline)
    worker: Worker | None = None
    """Where it runs, or ran last."""
    dispatched_ns: int = 0
    queue_ns: int = 0
    attempts: int = 0
    deaths: int = 0
    """Workers that died under it."""
    opened: bool = False
    """Whether it was the first that this gateway gave to its worker."""
    turn: asyncio.Future[Worker] | None = None
    begun: bool = False
    """Whether the response's head was sent: after that it cannot be tried again, only continued."""
    marks: ResumeMarkers | None = None
    """What it needs to be continued, of an event stream whose worker says that it can be."""
    lost_ns: int = 0
    """When its stream last lost its worker."""
    moves: int = 0
    """How often it did, and was to go on elsewhere."""
    start: StartKind | None = None
    """What it was for the worker that began to answer."""
    events: bool = False
    """Whether the response is an event stream, which can tell its own end."""
    event_count: int = 0
    leaving: Callable[[], None] | None = None
    """Of a socket, which has no end of its own: told when its worker is drained."""
    finished: bool = False
    """Whether its end is certain: its row is written, and all that is left is to hand the last bytes over."""
    status: int = 0
    error: str = ""
    billed_ms: int = 0


@dataclass(slots=True, eq=False)
class Worker:
    status: WorkerStatus
    ready_ns: int
    calls: set[Call] = field(default_factory=set)
    meter: Meter = field(default_factory=Meter)
    avoid_until_ns: int = 0
    called: bool = False

    @property
    def id(self) -> WorkerId:
        return self.status.worker


class VersionBackend:
    """Everything this gateway knows of one version."""

    def __init__(
        self,
        key: VersionKey,
        record: VersionRecord,
        *,
        elsewhere: Callable[[WorkerId], int],
        later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self.key = key
        self.record = record
        self.spec = record.spec
        self.queue: CallQueue[Call] = CallQueue()
        self.workers: dict[WorkerId, Worker] = {}
        self.service_time = ServiceTime()
        self.peak = 0
        """Most calls at one time since the last report: short ones between two reports keep their worker warm, too."""
        self.arrived = 0
        """Calls, ever."""
        self.idle_report_pending = False
        """Whether the end of its last call is about to be reported."""
        self.unplaced_since_ns: int | None = None
        self._draining: dict[WorkerId, Worker] = {}
        """Draining or gone, but with calls of ours that have not ended."""
        self._elsewhere = elsewhere
        self._later = later

    # ── slots ──────────────────────────────────────────────────────────────────────────────────────

    @property
    def running(self) -> int:
        return sum(len(worker.calls) for worker in (*self.workers.values(), *self._draining.values()))

    @property
    def slots(self) -> int:
        """Of the workers that are ready."""
        return len(self.workers) * self.spec.concurrency

    def has_free_slot(self, now_ns: int) -> bool:
        """Whether a call that came now would have a slot at once."""
        return not self.queue and self._best(now_ns) is not None

    def slots_in_use(self, now_ns: int) -> tuple[int, float]:
        """Slots that are taken, also by other gateways' calls, and how long these calls have run together, in s."""
        count, elapsed_ns, elsewhere = 0, 0, 0
        for worker in self.workers.values():
            count += len(worker.calls)
            elapsed_ns += sum(now_ns - call.dispatched_ns for call in worker.calls)
            elsewhere += self._elsewhere(worker.id)
        # How long the others' have run is not known: half of it.
        return count + elsewhere, elapsed_ns / 1e9 + elsewhere * self.service_time.mean_s / 2

    @property
    def idle(self) -> bool:
        return not self.queue and not self.running

    def try_acquire(self, call: Call, now_ns: int, *, first: bool = False) -> Worker | None:
        """Assigns a free slot on the least-loaded worker; None if there is none, or if calls wait and not `first`."""
        if self.queue and not first:
            return None
        best = self._best(now_ns)
        if best is not None:
            self._assign(call, best, now_ns)
        return best

    def enqueue(self, call: Call) -> asyncio.Future[Worker] | None:
        """Queues the call. Returns the future of its slot; None if the queue is full."""
        return self._wait_for_slot(call) if self.queue.offer(call) else None

    def requeue(self, call: Call) -> asyncio.Future[Worker]:
        """Puts a call that needs another worker at the front of the queue."""
        self.queue.put_back(call)
        return self._wait_for_slot(call)

    def _wait_for_slot(self, call: Call) -> asyncio.Future[Worker]:
        call.turn = asyncio.get_running_loop().create_future()
        self.peak = max(self.peak, self.running + len(self.queue))
        return call.turn

    def record_rejected(self) -> None:
        """Counts a call that was rejected for want of a worker as demand, as if it waited."""
        self.peak = max(self.peak, self.running + len(self.queue) + 1)
        self.arrived += 1

    def dispatch_waiting(self, now_ns: int) -> None:
        """Assigns free slots to waiting calls, in the order of the queue."""
        while self.queue:
            best = self._best(now_ns)
            call = self.queue.take(now_ns) if best is not None else None
            if best is None or call is None:
                return
            if call.turn is None or call.turn.done():
                continue
            self._assign(call, best, now_ns)
            call.turn.set_result(best)

    def fail_waiting(self, error: FleetError, accepted_until_ns: int) -> None:
        """Fails the waiting calls that were accepted until then."""
        for call in self.queue:
            if call.accepted_ns <= accepted_until_ns:
                self.queue.remove(call)
                if call.turn is not None and not call.turn.done():
                    call.turn.set_exception(error)

    def release(self, call: Call, now_ns: int, *, waive: bool) -> int:
        """Frees the call's slot. Returns the milliseconds that the call is billed for."""
        worker = call.worker
        if worker is None or call not in worker.calls:
            return 0
        worker.calls.discard(call)
        if waive:
            worker.meter.waive(call, now_ns)
            billed_ms = 0
        else:
            billed_ms = worker.meter.end(call, now_ns)
            self.service_time.observe((now_ns - call.dispatched_ns) / 1e9)
        if worker.id in self._draining and not worker.calls:
            del self._draining[worker.id]
        if worker.avoid_until_ns and not waive:
            worker.avoid_until_ns = 0
        if self.queue:
            self.dispatch_waiting(now_ns)
        return billed_ms

    def avoid(self, worker: Worker, now_ns: int, for_ns: int) -> None:
        worker.avoid_until_ns = now_ns + for_ns
        self._later(for_ns / 1e9 + 0.001, lambda: self.dispatch_waiting(time.monotonic_ns()))

    def _assign(self, call: Call, worker: Worker, now_ns: int) -> None:
        call.worker = worker
        call.opened, worker.called = not worker.called, True
        call.dispatched_ns = now_ns
        worker.calls.add(call)
        worker.meter.begin(call, now_ns)
        running = self.running + len(self.queue)
        if running > self.peak:
            self.peak = running

    def _best(self, now_ns: int) -> Worker | None:
        best: Worker | None = None
        least = self.spec.concurrency
        for worker in self.workers.values():
            if worker.avoid_until_ns > now_ns or len(worker.calls) >= least:
                continue
            load = len(worker.calls) + self._elsewhere(worker.id)
            if load < least:
                best, least = worker, load
        return best

    # ── workers ────────────────────────────────────────────────────────────────────────────────────

    def on_status(self, status: WorkerStatus, now_ns: int) -> None:
        """Applies a worker's status. Only a ready worker that has an endpoint gets calls."""
        known = self.workers.get(status.worker)
        if status.state == "ready" and status.endpoint:
            if known is None:
                known = self._draining.pop(status.worker, None) or Worker(status, now_ns)
                self.workers[status.worker] = known
            known.status = status
            self.dispatch_waiting(now_ns)
        elif known is not None:
            del self.workers[status.worker]
            if known.calls:
                self._draining[status.worker] = known
                for call in known.calls if status.state == "draining" else ():
                    if call.leaving is not None:
                        call.leaving()

    def load(self) -> FunctionLoad:
        """For the report; what was at its peak since the last published one counts as running."""
        per_worker = {
            worker.id: len(worker.calls)
            for worker in (*self.workers.values(), *self._draining.values())
            if worker.calls
        }
        queued, running = len(self.queue), self.running
        running = max(running, self.peak - queued)
        oldest = min(self.queue, key=lambda call: call.accepted_unix_ns, default=None)
        return FunctionLoad(
            queued,
            running,
            per_worker,
            self.arrived,
            self.service_time.mean_s,
            oldest.accepted_unix_ns // 1_000_000 if oldest is not None else 0,
            oldest.id if oldest is not None else "",
        )
