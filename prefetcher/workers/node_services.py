"""What a node offers its workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fleetstart.prefetcher.drivers.logs import Logs
from fleetstart.prefetcher.drivers.prefork_pool import Spares
from fleetstart.prefetcher.network.egress_proxy import Egress
from fleetstart.prefetcher.network.ingress_proxy import Doorways
from fleetstart.prefetcher.segments.store import Segments
from fleetstart.prefetcher.stage_links.relay import Relays
from fleetstart.prefetcher.workers.bundles import Bundles
from fleetstart.prefetcher.workers.call_latency import Speeds
from fleetstart.prefetcher.workers.meter import Rows
from fleetstart.prefetcher.workers.secrets import Opener
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
