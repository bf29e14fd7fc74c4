"""Who may come in: decided before a body is read, so that those who may not cost next to nothing.

Budgets, broken versions, the function's own limits, bodies that are too large, and calls whose turn would come too
late: these go away at once with the time of their turn, so that what is let in is answered within its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from fleetstart.runtime.contract.errors import FleetError, QueueFull, RateLimited
from fleetstart.runtime.contract.function.spec import Limits
from fleetstart.runtime.contract.ids import FunctionName
from fleetstart.runtime.contract.process.token_bucket import take_token

from ...billing.budget_watch import BudgetWatch
from ...http.asgi import Scope
from ...http.headers import queue_timeout_s, timeout_s
from ...http.request_body import declared_bytes, header, too_large
from ...state.traffic import limits_of, scale_of
from ...state.view import View
from ..dispatch.backend import Call, VersionBackend
from ..dispatch.queue import BODY_BUDGET_FACTOR
from .feasibility import start_failure
from .rate_limit import NO_LIMITS, burst_of, gateway_share
from .rejections import queue_timeout, rejection, retry_after_s
from .wait_predictor import WaitPrediction, WaitPredictor

SAFE_WAIT_SHARE = 0.7
"""Of the time that a call may wait, what its predicted wait may take: service times vary, and who is let in and then
does not make it has had the worst of both."""


class LimitUsage:
    """Of one function's limits, at this gateway."""

    __slots__ = ("calls", "due_s")

    def __init__(self) -> None:
        self.calls = 0
        """Under way."""
        self.due_s = 0.0


class AdmissionLimits(NamedTuple):
    """On which a call is let in."""

    timeout_s: float
    queue_s: float | None
    """How long it may wait for a worker; None: as long as it has time."""
    max_body_bytes: int
    used: LimitUsage | None = None
    """Where it is counted, of a function with limits."""


class AdmissionControl:
    """One a gateway."""

    def __init__(
        self,
        gateway: str,
        view: View,
        billing: BudgetWatch,
        wait_predictor: WaitPredictor,
        *,
        max_body_bytes: int,
        demand: Callable[[], None],
    ) -> None:
        self._gateway = gateway
        self._view = view
        self._billing = billing
        self._wait_predictor = wait_predictor
        self._demand = demand
        self._max_body_bytes = max_body_bytes
        self._body_bytes = 0
        """Of the calls under way."""
        self._used: dict[FunctionName, LimitUsage] = {}

    def admit(self, backend: VersionBackend, scope: Scope) -> AdmissionLimits:
        """Errors: FleetError, for one who is turned away."""
        spec = backend.spec
        granted = AdmissionLimits(
            timeout_s=timeout_s(header(scope, b"fs-timeout-s"), spec.timeout_s),
            queue_s=queue_timeout_s(header(scope, b"fs-queue-timeout-s"), spec.queue_timeout_s),
            max_body_bytes=min(spec.max_body_bytes or self._max_body_bytes, self._max_body_bytes),
        )
        body_bytes = declared_bytes(scope)
        self.check(backend, body_bytes, granted.max_body_bytes)
        now_ns = time.monotonic_ns()
        if not backend.has_free_slot(now_ns):
            self._check_wait(backend, granted, now_ns)
        if self._body_bytes + body_bytes > self._max_body_bytes * BODY_BUDGET_FACTOR:
            predicted = self._predict(backend, now_ns)
            raise QueueFull(
                f"this gateway holds {self._body_bytes} bytes of bodies of calls under way and takes no more",
                retry_after_s=retry_after_s(predicted.wait),
            )
        limits = self._limits(backend)
        if limits is not NO_LIMITS:
            return granted._replace(used=self._enter(backend, limits, now_ns))
        return granted

    def check(self, backend: VersionBackend, body_bytes: int, max_body_bytes: int | None = None) -> None:
        """What has nothing to do with whose turn it is. Errors: FleetError, for one who is turned away."""
        own = backend.spec.max_body_bytes
        limit_bytes = max_body_bytes or min(own or self._max_body_bytes, self._max_body_bytes)
        if body_bytes > limit_bytes:
            raise too_large(limit_bytes, own=bool(own))
        now_unix_ms = time.time_ns() // 1_000_000
        error = self._billing.refusal(backend.key.name, now_unix_ms) or start_failure(self._view, backend, now_unix_ms)
        if error is not None:
            raise error

    def took(self, body_bytes: int) -> None:
        """The body of a call that was let in is here."""
        self._body_bytes += body_bytes

    def leave(self, granted: AdmissionLimits, body_bytes: int) -> None:
        """A call that was let in has ended."""
        self._body_bytes -= body_bytes
        if granted.used is not None:
            granted.used.calls -= 1

    # ── the line ───────────────────────────────────────────────────────────────────────────────────

    def _check_wait(self, backend: VersionBackend, granted: AdmissionLimits, now_ns: int) -> None:
        predicted = self._predict(backend, now_ns)
        time_s = granted.timeout_s - predicted.wait.call_s
        allowed_s: float | None = time_s if time_s > 0 else granted.timeout_s
        if granted.queue_s is not None:
            allowed_s = min(allowed_s or 0.0, granted.queue_s)
        if backend.queue.full:
            allowed_s = None
        elif allowed_s:
            gateway_share = SAFE_WAIT_SHARE if backend.workers else 1.0
            if not predicted.sure or predicted.wait.seconds <= gateway_share * allowed_s:
                return
        backend.record_rejected()
        error = self._rejection(backend, predicted, allowed_s)
        if not backend.queue and not isinstance(error, QueueFull):
            self._demand()  # those who wait have told already
        raise error

    def queue_full(self, backend: VersionBackend) -> FleetError:
        """The queue has become full while the call's body came."""
        return self._rejection(backend, self._predict(backend, time.monotonic_ns()), None)

    def queue_timeout(self, backend: VersionBackend, call: Call) -> FleetError:
        now_ns = time.monotonic_ns()
        waited_s = (call.queue_ends_ns - call.accepted_ns) / 1e9
        return queue_timeout(backend.key.name, self._predict(backend, now_ns).wait, waited_s=waited_s)

    def _rejection(self, backend: VersionBackend, predicted: WaitPrediction, allowed_s: float | None) -> FleetError:
        most = scale_of(self._view.functions.get(backend.key.name), backend.spec).max
        at_most = predicted.workers >= most
        return rejection(backend.key.name, predicted.wait, allowed_s=allowed_s, at_most=at_most)

    def _predict(self, backend: VersionBackend, now_ns: int) -> WaitPrediction:
        return self._wait_predictor.predict(backend, now_ns, time.time_ns())

    # ── the function's own limits ──────────────────────────────────────────────────────────────────

    def _limits(self, backend: VersionBackend) -> Limits:
        """This gateway's share of them."""
        limits = limits_of(self._view.functions.get(backend.key.name), backend.spec)
        if limits == NO_LIMITS:
            self._used.pop(backend.key.name, None)
            return NO_LIMITS
        gateways = sorted({*self._view.gateways, self._gateway})
        return gateway_share(limits, len(gateways), gateways.index(self._gateway))

    def _enter(self, backend: VersionBackend, limits: Limits, now_ns: int) -> LimitUsage:
        """Errors: RateLimited."""
        name = backend.key.name
        used = self._used.setdefault(name, LimitUsage())
        if limits.concurrent and used.calls >= limits.concurrent:
            after_s = max(0.05, backend.service_time.mean_s / limits.concurrent)
            raise RateLimited(
                f"function {name}: {used.calls} calls are under way, its limit here is {limits.concurrent}; "
                f"one ends about every {after_s:.3g} s",
                hint=f"try again after Retry-After seconds, or raise it: fs scale {name} --concurrent",
                retry_after_s=after_s,
            )
        if limits.rate:
            used.due_s, wait_s = take_token(used.due_s, per_s=limits.rate, burst=burst_of(limits), now_s=now_ns / 1e9)
            if wait_s:
                raise RateLimited(
                    f"function {name}: its limit here is {limits.rate:g} calls a second; the next may come in "
                    f"{wait_s:.3g} s",
                    hint=f"try again after Retry-After seconds, or raise it: fs scale {name} --rate",
                    retry_after_s=wait_s,
                )
        used.calls += 1
        return used
