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

from ...billing.budget_watch import BudgetWatch
from ...http.asgi import Scope
from ...http.headers import queue_timeout_s, timeout_s
from ...http.request_body import declared_bytes, header, too_large
from ...state.traffic import limits_of, scale_of
from ...state.view import View
from ..dispatch.backend import Call, Route
from ..dispatch.queue import BODY_BUDGET_FACTOR
from .feasibility import start_failure
from .rate_limit import NO_LIMITS, draw, share
from .rejections import retry_after_s, turned_away, waited_out
from .wait_predictor import Predicted, Waits

SURE_SHARE = 0.7
"""Of the time that a call may wait, what its predicted wait may take: service times vary, and who is let in and then
does not make it has had the worst of both."""


class Used:
    """Of one function's limits, at this gateway."""

    __slots__ = ("calls", "due_s")

    def __init__(self) -> None:
        self.calls = 0
        """Under way."""
        self.due_s = 0.0


class Terms(NamedTuple):
    """On which a call is let in."""

    timeout_s: float
    queue_s: float | None
    """How long it may wait for a worker; None: as long as it has time."""
    max_body_bytes: int
    used: Used | None = None
    """Where it is counted, of a function with limits."""


class Doorkeeper:
    """One a gateway."""

    def __init__(
        self,
        gateway: str,
        view: View,
        billing: BudgetWatch,
        waits: Waits,
        *,
        max_body_bytes: int,
        demand: Callable[[], None],
    ) -> None:
        self._gateway = gateway
        self._view = view
        self._billing = billing
        self._waits = waits
        self._demand = demand
        self._max_body_bytes = max_body_bytes
        self._body_bytes = 0
        """Of the calls under way."""
        self._used: dict[FunctionName, Used] = {}

    def admit(self, route: Route, scope: Scope) -> Terms:
        """Errors: FleetError, for one who is turned away."""
        spec = route.spec
        terms = Terms(
            timeout_s=timeout_s(header(scope, b"fs-timeout-s"), spec.timeout_s),
            queue_s=queue_timeout_s(header(scope, b"fs-queue-timeout-s"), spec.queue_timeout_s),
            max_body_bytes=min(spec.max_body_bytes or self._max_body_bytes, self._max_body_bytes),
        )
        body_bytes = declared_bytes(scope)
        self.check(route, body_bytes, terms.max_body_bytes)
        now_ns = time.monotonic_ns()
        if not route.has_room(now_ns):
            self._check_turn(route, terms, now_ns)
        if self._body_bytes + body_bytes > self._max_body_bytes * BODY_BUDGET_FACTOR:
            predicted = self._predict(route, now_ns)
            raise QueueFull(
                f"this gateway holds {self._body_bytes} bytes of bodies of calls under way and takes no more",
                retry_after_s=retry_after_s(predicted.wait),
            )
        limits = self._limits(route)
        if limits is not NO_LIMITS:
            return terms._replace(used=self._enter(route, limits, now_ns))
        return terms

    def check(self, route: Route, body_bytes: int, max_body_bytes: int | None = None) -> None:
        """What has nothing to do with whose turn it is. Errors: FleetError, for one who is turned away."""
        own = route.spec.max_body_bytes
        limit_bytes = max_body_bytes or min(own or self._max_body_bytes, self._max_body_bytes)
        if body_bytes > limit_bytes:
            raise too_large(limit_bytes, own=bool(own))
        now_unix_ms = time.time_ns() // 1_000_000
        error = self._billing.refusal(route.key.name, now_unix_ms) or start_failure(self._view, route, now_unix_ms)
        if error is not None:
            raise error

    def took(self, body_bytes: int) -> None:
        """The body of a call that was let in is here."""
        self._body_bytes += body_bytes

    def leave(self, terms: Terms, body_bytes: int) -> None:
        """A call that was let in has ended."""
        self._body_bytes -= body_bytes
        if terms.used is not None:
            terms.used.calls -= 1

    # ── the line ───────────────────────────────────────────────────────────────────────────────────

    def _check_turn(self, route: Route, terms: Terms, now_ns: int) -> None:
        predicted = self._predict(route, now_ns)
        time_s = terms.timeout_s - predicted.wait.call_s
        allowed_s: float | None = time_s if time_s > 0 else terms.timeout_s
        if terms.queue_s is not None:
            allowed_s = min(allowed_s or 0.0, terms.queue_s)
        if route.queue.full:
            allowed_s = None
        elif allowed_s:
            share = SURE_SHARE if route.workers else 1.0
            if not predicted.sure or predicted.wait.seconds <= share * allowed_s:
                return
        route.missed()
        error = self._turned_away(route, predicted, allowed_s)
        if not route.queue and not isinstance(error, QueueFull):
            self._demand()  # those who wait have told already
        raise error

    def turned_away(self, route: Route) -> FleetError:
        """The queue has become full while the call's body came."""
        return self._turned_away(route, self._predict(route, time.monotonic_ns()), None)

    def waited_out(self, route: Route, call: Call) -> FleetError:
        now_ns = time.monotonic_ns()
        waited_s = (call.queue_ends_ns - call.accepted_ns) / 1e9
        return waited_out(route.key.name, self._predict(route, now_ns).wait, waited_s=waited_s)

    def _turned_away(self, route: Route, predicted: Predicted, allowed_s: float | None) -> FleetError:
        most = scale_of(self._view.functions.get(route.key.name), route.spec).max
        at_most = predicted.workers >= most
        return turned_away(route.key.name, predicted.wait, allowed_s=allowed_s, at_most=at_most)

    def _predict(self, route: Route, now_ns: int) -> Predicted:
        return self._waits.predict(route, now_ns, time.time_ns())

    # ── the function's own limits ──────────────────────────────────────────────────────────────────

    def _limits(self, route: Route) -> Limits:
        """This gateway's share of them."""
        limits = limits_of(self._view.functions.get(route.key.name), route.spec)
        if limits == NO_LIMITS:
            self._used.pop(route.key.name, None)
            return NO_LIMITS
        gateways = sorted({*self._view.gateways, self._gateway})
        return share(limits, len(gateways), gateways.index(self._gateway))

    def _enter(self, route: Route, limits: Limits, now_ns: int) -> Used:
        """Errors: RateLimited."""
        name = route.key.name
        used = self._used.setdefault(name, Used())
        if limits.concurrent and used.calls >= limits.concurrent:
            after_s = max(0.05, route.service_time.mean_s / limits.concurrent)
            raise RateLimited(
                f"function {name}: {used.calls} calls are under way, its limit here is {limits.concurrent}; "
                f"one ends about every {after_s:.3g} s",
                hint=f"try again after Retry-After seconds, or raise it: fs scale {name} --concurrent",
                retry_after_s=after_s,
            )
        if limits.rate:
            used.due_s, wait_s = draw(used.due_s, limits, now_ns / 1e9)
            if wait_s:
                raise RateLimited(
                    f"function {name}: its limit here is {limits.rate:g} calls a second; the next may come in "
                    f"{wait_s:.3g} s",
                    hint=f"try again after Retry-After seconds, or raise it: fs scale {name} --rate",
                    retry_after_s=wait_s,
                )
        used.calls += 1
        return used
