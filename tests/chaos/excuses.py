"""Excuses: what the platform says that a fault may undo. Pure.

Two promises have a limit in docs: the claim of an idempotency key is a lease (docs/http.md), and a gateway that cannot
read Redis keeps the keys and versions that it knew (docs/security.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.chaos.history import Fault

REDIS = "redis"
GATEWAYS = "gateway-"
REDIS_HOST = "control"
PART = "part"
"""Two hosts that do not reach each other, and reach all others."""
LEASE_S = 5.0
"""Of a claim; its gateway renews it every 1.5 s."""
AFTER_S = 8.0
"""After a fault: a client that retries finds the claim lapsed up to a lease later, and a busy machine is late."""


class Excuses:
    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = faults

    def claim_may_lapse(self, from_s: float, to_s: float) -> bool:
        """Whether gateways or Redis were disturbed around that time."""
        return any(
            _disturbs_claims(fault) and fault.at_s <= to_s and fault.healed_s + AFTER_S >= from_s
            for fault in self._faults
        )

    def informed_since(self, gateway: str, known_s: float, until_s: float) -> float:
        """When the gateway could last have learnt what was known at `known_s`: later if it was cut off from Redis."""
        since_s = known_s
        for fault in self._faults:
            if _cuts_off(fault, gateway) and fault.at_s <= until_s and fault.healed_s >= known_s - 1:
                since_s = max(since_s, fault.healed_s)
        return since_s


def _disturbs_claims(fault: Fault) -> bool:
    gateways = any(target.startswith(GATEWAYS) for target in fault.targets)
    if fault.kind == PART:
        return gateways and REDIS_HOST in fault.targets
    return gateways or REDIS in fault.targets or REDIS_HOST in fault.targets


def _cuts_off(fault: Fault, gateway: str) -> bool:
    """Faults of Redis that leave it readable are none: maxmemory, READONLY and a full disk stop writes alone."""
    if fault.kind == PART:
        return gateway in fault.targets and REDIS_HOST in fault.targets
    if REDIS in fault.targets:
        return fault.kind in ("kill", "stop")
    return REDIS_HOST in fault.targets or gateway in fault.targets
