"""Excuses: what the platform says that a fault may undo. Pure.

Four promises have a limit in docs: a call leaves no row if its gateway is killed while Redis takes no writes, and one
that went on at another gateway after 4 s of silence is told of two costs (docs/billing.md); a gateway that is silent
for 10 s loses the claims of its idempotency keys (docs/http.md), and one that cannot read Redis keeps the keys and
versions that it knew (docs/security.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.chaos.history import Fault

REDIS = "redis"
GATEWAYS = "gateway-"
REDIS_HOST = "control"
PART = "part"
"""Two hosts that do not reach each other, and reach all others."""
SILENT_S = 9.0
"""A gateway that Redis does not hear for 10 s counts as dead; it renews its claims less often than it is looked at."""
KEPT_SILENT_S = 2.0
"""The same for a keyed call whose answer its worker keeps: it goes on elsewhere after 4 s, renewed each 1.5 s."""
AFTER_S = 2.0
"""From a gateway's end until a worker has run what it was given before: the run may be written down after the fault."""


class Excuses:
    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = faults

    def claim_may_lapse(self, from_s: float, to_s: float) -> bool:
        """True if a gateway was killed, or silent for so long that it counted as dead, between two runs."""
        return any(
            _silences(fault) and fault.at_s <= to_s and fault.healed_s + AFTER_S >= from_s for fault in self._faults
        )

    def two_may_answer(self, from_s: float, to_s: float) -> bool:
        """True if a gateway was silent for so long that another one went on with its keyed call: each names its own
        measure of the cost."""
        return any(
            _silences(fault, KEPT_SILENT_S) and fault.at_s <= to_s and fault.healed_s + AFTER_S >= from_s
            for fault in self._faults
        )

    def opening_may_be_lost(self, gateway: str, from_s: float, to_s: float) -> bool:
        """True if the gateway was killed during a call of which Redis, that took no writes, could not know."""
        killed = any(
            fault.kind == "kill" and gateway in fault.targets and from_s <= fault.at_s <= to_s + AFTER_S
            for fault in self._faults
        )
        return killed and any(
            {REDIS, REDIS_HOST} & set(fault.targets) and fault.at_s <= to_s and fault.healed_s >= from_s
            for fault in self._faults
        )

    def informed_since(self, gateway: str, known_s: float, until_s: float) -> float:
        """When the gateway could last have learnt what was known at `known_s`: later if it was cut off from Redis."""
        since_s = known_s
        for fault in self._faults:
            if _cuts_off(fault, gateway) and fault.at_s <= until_s and fault.healed_s >= known_s - 1:
                since_s = max(since_s, fault.healed_s)
        return since_s


def _silences(fault: Fault, silent_s: float = SILENT_S) -> bool:
    """Redis that stands still, or refuses writes, is no excuse: what waits for it goes on waiting."""
    gateways = any(target.startswith(GATEWAYS) for target in fault.targets)
    if not gateways or (fault.kind == PART and REDIS_HOST not in fault.targets):
        return False
    return fault.kind == "kill" or fault.healed_s - fault.at_s >= silent_s


def _cuts_off(fault: Fault, gateway: str) -> bool:
    """Faults of Redis that leave it readable are none: maxmemory, READONLY and a full disk stop writes alone."""
    if fault.kind == PART:
        return gateway in fault.targets and REDIS_HOST in fault.targets
    if REDIS in fault.targets:
        return fault.kind in ("kill", "stop")
    return REDIS_HOST in fault.targets or gateway in fault.targets
