"""Admission control. Rejects a request before its body is read, so that a rejection is cheap.

Reasons are budgets, broken versions, the function's own limits (`limits`), bodies that are too large, and predicted
waits that are too long. A rejection carries Retry-After, and a call that is admitted is answered within its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from fleetstart.runtime.contract.errors import FleetError, QueueFull
from fleetstart.runtime.contract.function.spec import Limits
from fleetstart.runtime.contract.ids import FunctionName

from ...billing.budget_watch import BudgetWatch
from ...http.asgi import Scope
from ...http.body_budget import BodyBudget
from ...http.headers import queue_timeout_s, timeout_s
from ...http.keyed_call import KEYED_CALL, KeyedCall
from ...http.request_body import declared_bytes, header, too_large
from ...state.traffic import limits_of, scale_of
from ...state.view import View
from ..dispatch.queue import BODY_BUDGET_FACTOR
from ..dispatch.version_backend import Call, VersionBackend
from .feasibility import start_failure
from .limits import NO_LIMITS, LimitUsage, gateway_share
from .rejections import queue_timeout, rejection
from .wait_predictor import WaitPrediction, WaitPredictor

SAFE_WAIT_SHARE = 0.7
"""A call is admitted only if its predicted wait is below this share of what it may wait: service times vary, and a call
that is admitted and then times out has both waited and failed."""


class AdmissionLimits(NamedTuple):
    """Limits of one admitted call."""

    timeout_s: float
    queue_s: float | None
    """Its wait for a worker at most; None: until its deadline."""
    max_body_bytes: int
    usage: LimitUsage | None = None
    """Counts the call, if the function has limits."""


class AdmissionControl:
    """Decides for a gateway which calls are admitted, and counts those under way."""

    def __init__(
        self,
        gateway: str,
        view: View,
        billing: BudgetWatch,
        wait_predictor: WaitPredictor,
        *,
        max_body_bytes: int,
        report_now: Callable[[], None],
    ) -> None:
        self._gateway = gateway
        self._view = view
        self._billing = billing
        self._wait_predictor = wait_predictor
        self._report_now = report_now
        self._max_body_bytes = max_body_bytes
        self.bodies = BodyBudget(max_body_bytes * BODY_BUDGET_FACTOR)
        self._usage: dict[FunctionName, LimitUsage] = {}

    def admit(self, backend: VersionBackend, scope: Scope) -> AdmissionLimits:
        """Admits a request and returns its limits. Errors: FleetError if it is rejected."""
        spec = backend.spec
        granted = AdmissionLimits(
            timeout_s=timeout_s(header(scope, b"fs-timeout-s"), spec.timeout_s),
            queue_s=queue_timeout_s(header(scope, b"fs-queue-timeout-s"), spec.queue_timeout_s),
            max_body_bytes=min(spec.max_body_bytes or self._max_body_bytes, self._max_body_bytes),
        )
        body_bytes = declared_bytes(scope)
        self.check(backend, body_bytes, granted.max_body_bytes)
        now_ns = time.monotonic_ns()
        keyed: KeyedCall | None = scope.get(KEYED_CALL)
        runs_already = keyed is not None and (keyed.worker is not None or keyed.lost is not None)
        if not runs_already and not backend.has_free_slot(now_ns):
            self._check_wait(backend, granted, now_ns)
        self.bodies.require_room(body_bytes)
        limits = self._gateway_limits(backend)
        if limits is NO_LIMITS:
            return granted
        usage = self._usage.setdefault(backend.key.name, LimitUsage())
        usage.add_call(backend.key.name, limits, service_s=backend.service_time.mean_s, now_s=now_ns / 1e9)
        return granted._replace(usage=usage)

    def check(self, backend: VersionBackend, body_bytes: int, max_body_bytes: int | None = None) -> None:
        """Checks body size, budget and the version's starts, but not the wait. Errors: FleetError if it is rejected."""
        own = backend.spec.max_body_bytes
        limit_bytes = max_body_bytes or min(own or self._max_body_bytes, self._max_body_bytes)
        if body_bytes > limit_bytes:
            raise too_large(limit_bytes, own=bool(own))
        now_unix_ms = time.time_ns() // 1_000_000
        error = self._billing.refusal(backend.key.name, now_unix_ms) or start_failure(self._view, backend, now_unix_ms)
        if error is not None:
            raise error

    def release(self, granted: AdmissionLimits) -> None:
        """Ends an admitted call: its place is free again."""
        if granted.usage is not None:
            granted.usage.calls -= 1

    # ── the wait ───────────────────────────────────────────────────────────────────────────────────

    def _check_wait(self, backend: VersionBackend, granted: AdmissionLimits, now_ns: int) -> None:
        predicted = self._predict(backend, now_ns)
        time_s = granted.timeout_s - predicted.wait.call_s
        allowed_s: float | None = time_s if time_s > 0 else granted.timeout_s
        if granted.queue_s is not None:
            allowed_s = min(allowed_s or 0.0, granted.queue_s)
        if backend.queue.full:
            allowed_s = None
        elif allowed_s:
            share = SAFE_WAIT_SHARE if backend.workers else 1.0
            if not predicted.sure or predicted.wait.seconds <= share * allowed_s:
                return
        backend.record_rejected()
        error = self._rejection(backend, predicted, allowed_s)
        if not backend.queue and not isinstance(error, QueueFull):
            self._report_now()  # waiting calls are reported already
        raise error

    def queue_full(self, backend: VersionBackend) -> FleetError:
        """The error for a call when the queue became full while its body was read."""
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

    def _gateway_limits(self, backend: VersionBackend) -> Limits:
        """This gateway's share of the function's limits."""
        limits = limits_of(self._view.functions.get(backend.key.name), backend.spec)
        if limits == NO_LIMITS:
            self._usage.pop(backend.key.name, None)
            return NO_LIMITS
        gateways = sorted({*self._view.gateways, self._gateway})
        return gateway_share(limits, len(gateways), gateways.index(self._gateway))
