"""Backend of one version at this gateway: its ready workers, the calls on them, and the calls that wait for a slot.

A call takes a free slot at once, without a task or a future. Only if there is none does it wait in the queue, and the
schedulers learn of it. Slots come free when calls end, and appear when a worker's status says ready. Does no I/O:
`dispatcher` sends the calls.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fleetstart.runtime.contract.billing.prices import FIRST, PriceSheet
from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.ids import FunctionName, InvocationId, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerStatus
from fleetstart.runtime.contract.node.reports import FunctionLoad

from ...billing.apportionment import Meter
from ...http.keyed_call import KeyedCall
from ...http.scope import StoredCall
from ...state.records import VersionKey, VersionRecord
from .queue import CallQueue, ServiceTime
from .recent_calls import RecentCalls

BUSY_BACKOFF_NS = 20_000_000
"""Backoff of a worker that was full (with another gateway's calls), unless a call of ours ends there."""
FULL_COUNTS_NS = 500_000_000
"""Time for which a worker must have said that it is full until slots of which nothing is known here count as taken:
what other gateways run on it is reported sooner."""
FULL_KEPT_NS = 1_000_000_000
"""Time for which this counts after it was said last, so that a worker that nobody asks is not kept for it."""
SUSPECT_BACKOFF_NS = 500_000_000
"""Backoff of a worker that broke a connection: by then its node has reported whether it lives."""


NO_CALL = InvocationId("")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """An invocation as it was accepted. What becomes of it is its `CallRecord`."""

    id: InvocationId
    method: str
    target: str
    """Path and query as the worker shall see them."""
    headers: Sequence[tuple[str, str]]
    body: bytes
    accepted_ns: int
    accepted_unix_ns: int
    deadline_ns: int
    queue_ends_ns: int = 0
    """When its wait for a worker ends; 0: at its deadline."""
    price: PriceSheet = FIRST
    """Prices in force when it was accepted."""
    key: str = ""
    """Name of the API key that its caller showed."""
    root: str = ""
    """Path of the function as it was called, above `target`."""
    parent: InvocationId = NO_CALL
    """The call for which a function made this one; empty for a client's."""
    chain: tuple[FunctionName, ...] = ()
    """The functions above it, the caller last; none for a client's."""
    keyed: KeyedCall | None = None
    """Of a call with an idempotency key: another gateway can go on with it."""
    stored: StoredCall | None = None
    """Of an async call: it is told what becomes of this run."""
    repeat_key: str = ""
    """What is the same if the call runs again; empty if it is not known to be a repetition."""
    request_id: str = ""
    """The caller's own id, for people; empty if it gave none."""

    @property
    def caller(self) -> FunctionName:
        """The function that made it; empty for a client's call."""
        return self.chain[-1] if self.chain else FunctionName("")


@dataclass(frozen=True, slots=True, eq=False)
class Attempt:
    """A call on a worker's slot. Made and ended by the `VersionBackend` alone."""

    call: Call
    worker: Worker
    started_ns: int
    first_on_worker: bool
    """It is the first call that this gateway gave to the worker."""
    entered_before: int
    """Calls that the worker had entered before, as far as this gateway knew."""

    @property
    def active(self) -> bool:
        return self in self.worker.attempts

    def service_s(self, ended_ns: int) -> float:
        """Service time of the call, which has ended, as later ones expect it. One that its deadline ended counts with
        all the time that it had, what it waited for a slot included: with a little less, a later call that has as
        much would be taken to have next to no time to wait."""
        call = self.call
        return (ended_ns - (call.accepted_ns if ended_ns >= call.deadline_ns else self.started_ns)) / 1e9


@dataclass(frozen=True, slots=True, eq=False)
class QueuedCall:
    """A call that waits for a slot."""

    call: Call
    slot: asyncio.Future[Attempt]

    @property
    def deadline_ns(self) -> int:
        return self.call.deadline_ns


@dataclass(slots=True, eq=False)
class Worker:
    """A worker of the version that is ready, or has calls of this gateway. Written by the `VersionBackend` alone."""

    status: WorkerStatus
    ready_ns: int
    attempts: set[Attempt] = field(default_factory=set)
    meter: Meter = field(default_factory=Meter)
    avoid_until_ns: int = 0
    full_since_ns: int = 0
    """Since when it says that it is full, for whatever goes on there after an answer; 0 if it does not."""
    full_seen_ns: int = 0
    called: bool = False
    entered: int = 0
    """Calls that it has entered, as of the responses that have come."""
    drain_callbacks: dict[Attempt, Callable[[], None]] = field(default_factory=dict)
    """Called when the worker is drained, for WebSockets, which have no end of their own."""

    @property
    def id(self) -> WorkerId:
        return self.status.worker


class VersionBackend:
    """The workers, slots and queue of one version at this gateway."""

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
        self.queue: CallQueue[QueuedCall] = CallQueue()
        self.workers: dict[WorkerId, Worker] = {}
        self.service_time = ServiceTime()
        self.peak = 0
        """Most calls at one time since the last published report: short ones in between keep a worker warm, too."""
        self.recent = RecentCalls()
        self.reported_busy = False
        """Its last report counted calls."""
        self.idle_report_pending = False
        """The end of its last call is about to be reported."""
        self.open_calls = 0
        """Calls with a record: also one that has lost its worker, and is about to wait for another one."""
        self.unplaced_since_ns: int | None = None
        self._draining: dict[WorkerId, Worker] = {}
        """Workers that are draining or gone, with calls of ours that have not ended."""
        self._elsewhere = elsewhere
        self._later = later

    # ── slots ──────────────────────────────────────────────────────────────────────────────────────

    @property
    def running(self) -> int:
        return sum(len(worker.attempts) for worker in (*self.workers.values(), *self._draining.values()))

    @property
    def slots(self) -> int:
        """Slots of ready workers, taken or free."""
        return len(self.workers) * self.spec.concurrency

    def has_free_slot(self, now_ns: int) -> bool:
        """True if a call that came now would have a slot at once."""
        return not self.queue and self._best(now_ns) is not None

    def slots_in_use(self, now_ns: int) -> tuple[int, float]:
        """Slots that are taken, also by other gateways' calls, and the sum of these calls' run times, in s."""
        count, elapsed_ns, elsewhere = 0, 0, 0
        for worker in self.workers.values():
            count += len(worker.attempts)
            elapsed_ns += sum(now_ns - attempt.started_ns for attempt in worker.attempts)
            elsewhere += self._elsewhere(worker.id)
        # How long other gateways' calls have run is not known: half of the mean.
        return count + elsewhere, elapsed_ns / 1e9 + elsewhere * self.service_time.mean_s / 2

    @property
    def idle(self) -> bool:
        return not self.queue and not self.running

    @property
    def quiet(self) -> bool:
        """Checks whether there is nothing to report, and its last report said so."""
        return not (self.reported_busy or self.peak or self.queue or self.running)

    def try_acquire(self, call: Call, now_ns: int, *, first: bool = False) -> Attempt | None:
        """Assigns a free slot on the least-loaded worker; None if there is none, or if calls wait and not `first`."""
        if self.queue and not first:
            return None
        best = self._best(now_ns)
        return self._assign(call, best, now_ns) if best is not None else None

    def attach(self, call: Call, status: WorkerStatus, now_ns: int) -> Attempt:
        """An attempt on the worker that runs the call already, for another gateway that is gone: it takes no slot."""
        worker = self.workers.get(status.worker) or self._draining.get(status.worker)
        if worker is None:
            worker = self._draining[status.worker] = Worker(status, 0)
        return self._assign(call, worker, now_ns)

    def enqueue(self, call: Call) -> QueuedCall | None:
        """Queues the call; None if the queue is full."""
        queued = QueuedCall(call, asyncio.get_running_loop().create_future())
        if not self.queue.offer(queued):
            return None
        self._note_peak()
        return queued

    def requeue(self, call: Call) -> QueuedCall:
        """Puts a call that needs another worker at the front of the queue."""
        queued = QueuedCall(call, asyncio.get_running_loop().create_future())
        self.queue.put_back(queued)
        self._note_peak()
        return queued

    def withdraw(self, queued: QueuedCall, now_ns: int) -> None:
        """Ends the wait of a call. A slot that it was given in that moment is free again, and not billed."""
        self.queue.remove(queued)
        slot = queued.slot
        if slot.done() and not slot.cancelled() and slot.exception() is None:
            self.release(slot.result(), now_ns, waive=True)

    def record_rejected(self) -> None:
        """Counts a call that was rejected for want of a worker as demand, as if it waited."""
        self.peak = max(self.peak, self.running + len(self.queue) + 1)
        self.recent.add(time.monotonic_ns())

    def dispatch_waiting(self, now_ns: int) -> None:
        """Assigns free slots to waiting calls, in the order of the queue."""
        while self.queue:
            best = self._best(now_ns)
            queued = self.queue.take(now_ns) if best is not None else None
            if best is None or queued is None:
                return
            if not queued.slot.done():
                queued.slot.set_result(self._assign(queued.call, best, now_ns))

    def fail_waiting(self, error: FleetError, accepted_until_ns: int) -> None:
        """Fails the waiting calls that were accepted until then."""
        for queued in self.queue:
            if queued.call.accepted_ns <= accepted_until_ns:
                self.queue.remove(queued)
                if not queued.slot.done():
                    queued.slot.set_exception(error)

    def release(self, attempt: Attempt, now_ns: int, *, waive: bool, broke: bool = False) -> int:
        """Frees the attempt's slot. Returns the milliseconds that the call is billed for.

        `broke`: its worker broke off, so that this says nothing good of the worker or of how long a call takes.
        """
        worker = attempt.worker
        if attempt not in worker.attempts:
            return 0
        worker.attempts.discard(attempt)
        worker.drain_callbacks.pop(attempt, None)
        if waive:
            worker.meter.waive(attempt, now_ns)
            billed_ms = 0
        else:
            billed_ms = worker.meter.end(attempt, now_ns)
            if not broke:
                self.service_time.observe(attempt.service_s(now_ns))
        if worker.id in self._draining and not worker.attempts:
            del self._draining[worker.id]
        if not waive and not broke:
            worker.avoid_until_ns = worker.full_since_ns = 0
        if self.queue:
            self.dispatch_waiting(now_ns)
        return billed_ms

    def avoid(self, worker: Worker, now_ns: int, for_ns: int) -> None:
        worker.avoid_until_ns = now_ns + for_ns
        self._later(for_ns / 1e9 + 0.001, lambda: self.dispatch_waiting(time.monotonic_ns()))

    def note_full(self, worker: Worker, now_ns: int) -> None:
        """Notes that the worker said that it is full, where a slot was free as far as is known here."""
        if not worker.full_since_ns or now_ns - worker.full_seen_ns > FULL_KEPT_NS:
            worker.full_since_ns = now_ns
        worker.full_seen_ns = now_ns

    def _hidden(self, worker: Worker, now_ns: int) -> int:
        """Slots of a worker that are taken by what no gateway knows of, such as the background tasks of an app."""
        lasting = worker.full_since_ns and now_ns - worker.full_since_ns >= FULL_COUNTS_NS
        if not lasting or now_ns - worker.full_seen_ns > FULL_KEPT_NS:
            return 0
        return max(0, self.spec.concurrency - len(worker.attempts) - self._elsewhere(worker.id))

    def note_entered(self, worker: Worker, count: str) -> None:
        """Records how many calls the worker had entered when it began a response; user code may have written it."""
        if count.isdecimal() and len(count) < 19:
            worker.entered = max(worker.entered, int(count))

    def on_drain(self, attempt: Attempt, callback: Callable[[], None]) -> None:
        """Calls back when the attempt's worker is drained, unless the attempt has ended."""
        attempt.worker.drain_callbacks[attempt] = callback

    def _assign(self, call: Call, worker: Worker, now_ns: int) -> Attempt:
        attempt = Attempt(call, worker, now_ns, not worker.called, worker.entered)
        worker.called = True
        worker.attempts.add(attempt)
        worker.meter.begin(attempt, now_ns)
        self._note_peak()
        return attempt

    def _note_peak(self) -> None:
        self.peak = max(self.peak, self.running + len(self.queue))

    def _best(self, now_ns: int) -> Worker | None:
        best: Worker | None = None
        least = self.spec.concurrency
        for worker in self.workers.values():
            if worker.avoid_until_ns > now_ns or len(worker.attempts) >= least:
                continue
            load = len(worker.attempts) + self._elsewhere(worker.id)
            if load < least:
                best, least = worker, load
        return best

    # ── workers ────────────────────────────────────────────────────────────────────────────────────

    def serves(self, worker: Worker) -> bool:
        """True if the worker is ready, and not draining, as far as is known here."""
        return self.workers.get(worker.id) is worker

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
            if known.attempts:
                self._draining[status.worker] = known
                for drained in list(known.drain_callbacks.values()) if status.state == "draining" else ():
                    drained()

    def load(self, now_ns: int) -> FunctionLoad:
        """Load for the report. The peak since the last published report counts as running."""
        per_worker = {
            worker.id: len(worker.attempts)
            for worker in (*self.workers.values(), *self._draining.values())
            if worker.attempts
        }
        queued, running = len(self.queue), self.running
        hidden = sum(self._hidden(worker, now_ns) for worker in self.workers.values())
        running = max(running, self.peak - queued) + hidden
        self.reported_busy = bool(queued or running)
        oldest = min((queued.call for queued in self.queue), key=lambda call: call.accepted_unix_ns, default=None)
        return FunctionLoad(
            queued,
            running,
            per_worker,
            self.recent.count(now_ns),
            self.service_time.mean_s,
            oldest.accepted_unix_ns // 1_000_000 if oldest is not None else 0,
            oldest.id if oldest is not None else "",
        )
