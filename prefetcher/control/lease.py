"""The node's lease in Redis, and what it reports of itself with it: each second, and at once when that changed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Mapping

from fleetstart.runtime.contract.node.reports import NodeReport

from ..config import Config
from ..drivers.cgroups import Groups
from ..drivers.forkserver import ForkServer
from ..network.egress_proxy import Traffic
from ..segments.store import Segments
from ..workers.call_latency import Speeds
from ..workers.meter import Rows
from .redis_state import LEASE_MS, NodeState, Unreachable

log = logging.getLogger(__name__)

RENEW_S = LEASE_MS / 3000
AWAY_S = 0.2
"""Between renewals that fail."""


class Lease:
    """`back` is called when Redis is back after it was away."""

    def __init__(self, state: NodeState, report: Callable[[], NodeReport], back: Callable[[], None]) -> None:
        self._state = state
        self._report = report
        self._back = back
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """There is something new to report."""
        self._changed.set()

    async def renew(self) -> None:
        """Until cancelled."""
        was_away = False
        while True:
            self._changed.clear()
            try:
                await self._state.renew(self._report())
                if was_away:
                    log.warning("Redis is back, writing everything again")
                    self._back()
                was_away = False
            except Unreachable as error:
                if not was_away:
                    log.warning("Redis is away, workers run on", extra={"error": str(error)})
                was_away = True
                await asyncio.sleep(AWAY_S)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RENEW_S):
                    await self._changed.wait()


def report_of(
    config: Config,
    epoch: str,
    *,
    workers_bytes: int,
    segments: Segments,
    servers: Mapping[str, ForkServer],
    groups: Groups | None,
    speeds: Speeds,
    rows: Rows,
    public_key: str,
    egress: Traffic,
) -> NodeReport:
    """What the scheduler learns of the node."""
    warm = {name: server.warm for name, server in servers.items() if server.warm is not None}
    return NodeReport(
        node=config.node,
        epoch=epoch,
        address=config.address,
        memory_bytes=config.memory_bytes,
        memory_used_bytes=workers_bytes + segments.room.used_bytes,
        cpus=config.cpus,
        segments=segments.reports(),
        isolation=next((said.isolation for said in warm.values()), ""),
        limits=groups.name if groups is not None else "watched",
        profiles=sorted(warm),
        isolations=sorted({pool.partition("+")[2] for pool, server in servers.items() if not server.refused} - {""}),
        pid=os.getpid(),
        public_key=public_key,
        region=config.region,
        egress_bytes={"in": egress.received_bytes, "out": egress.sent_bytes},
        egress_refused=egress.refused,
        weights_memory=segments.room.memory.report(),
        bytes_per_s=segments.bandwidths.bytes_per_s(),
        fetched_bytes=segments.fetched_bytes,
        waived_ms=rows.waived_ms,
        kept_nusd=rows.kept_nusd,
        disk_bytes=segments.disk_bytes,
        disk=segments.disk_ranges(),
        speeds=speeds.report(),
    )
