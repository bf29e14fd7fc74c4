"""What a node offers its workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fleetstart.prefetcher.bundles import Bundles
from fleetstart.prefetcher.doorway import Doorways
from fleetstart.prefetcher.egress import Egress
from fleetstart.prefetcher.logs import Logs
from fleetstart.prefetcher.meter import Rows
from fleetstart.prefetcher.relay import Relays
from fleetstart.prefetcher.segments import Segments
from fleetstart.prefetcher.spares import Spares
from fleetstart.prefetcher.speeds import Speeds
from fleetstart.prefetcher.unsealing import Opener
from fleetstart.runtime.contract.ids import NodeId
from fleetstart.runtime.contract.node.orders import WorkerStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    node: NodeId
    address: str
    cpus: int
    bundles: Bundles
    segments: Segments
    spares: Spares
    logs: Logs
    rows: Rows
    speeds: Speeds
    opener: Opener
    egress: Egress
    doorways: Doorways
    relays: Relays | None
    """None where the store is none that nodes share over a network."""
    publish: Callable[[WorkerStatus], None]
