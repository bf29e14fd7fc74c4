"""Who may come in: decided before a body is read, so that those who may not cost next to nothing."""

from __future__ import annotations

import time

from fleetstart.controller.admission import BODY_BUDGET_FACTOR
from fleetstart.controller.billing.watch import BillingWatch
from fleetstart.controller.prospects import start_failure
from fleetstart.controller.routes import Route
from fleetstart.controller.uploads import too_large
from fleetstart.controller.view import View
from fleetstart.runtime.contract.errors import QueueFull


class Doorkeeper:
    """One a gateway."""

    def __init__(self, view: View, billing: BillingWatch, *, max_body_bytes: int) -> None:
        self._view = view
        self._billing = billing
        self.max_body_bytes = max_body_bytes
        self.body_bytes = 0
        """Of the calls under way."""

    def admit(self, route: Route, body_bytes: int) -> None:
        """Errors: FleetError, for one who is turned away."""
        if body_bytes > self.max_body_bytes:
            raise too_large(self.max_body_bytes)
        now_unix_ms = time.time_ns() // 1_000_000
        error = self._billing.refusal(route.key.name, now_unix_ms) or start_failure(self._view, route, now_unix_ms)
        if error is not None:
            raise error
        if route.queue.full:
            raise route.full()
        if self.body_bytes + body_bytes > self.max_body_bytes * BODY_BUDGET_FACTOR:
            raise QueueFull(
                f"this gateway holds {self.body_bytes} bytes of bodies of calls under way and takes no more",
                retry_after_s=route.service_time.retry_after_s(len(route.queue), len(route.workers)),
            )
