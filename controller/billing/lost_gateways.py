"""Detection of lost gateways, so that their open calls are closed by others. Pure.

A lease that is absent at one look proves little: after an outage of Redis all of them are, and those of gateways whose
loop stood still. So a gateway is lost when its lease was absent at each look for `LOST_NS`, while the looking gateway's
own lease was there each time: then Redis took writes, and was the one that leases are renewed in.
"""

from __future__ import annotations

from collections.abc import Set

LOST_NS = 30_000_000_000
"""Time for which a lease must be absent: ten times its length."""
LOOKS_NS = 12_000_000_000
"""Time between two looks, of which there is one each 5 s, after which the looks begin again: nobody looked."""


class LostGateways:
    def __init__(self) -> None:
        self._absent_since_ns: dict[str, int] = {}
        self._looked_ns = 0

    def look(self, named: Set[str], alive: Set[str], *, own: str, now_ns: int) -> frozenset[str]:
        """The gateways of `named` that are lost. `alive`: those whose lease is there; `own`: the one that looks."""
        if own not in alive or now_ns - self._looked_ns > LOOKS_NS:
            self._absent_since_ns.clear()
        self._looked_ns = now_ns
        if own not in alive:
            return frozenset()
        absent = named - alive
        self._absent_since_ns = {name: self._absent_since_ns.get(name, now_ns) for name in absent}
        return frozenset(name for name, since_ns in self._absent_since_ns.items() if now_ns - since_ns >= LOST_NS)
