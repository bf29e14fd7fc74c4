"""What a node offers its workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fleetstart.runtime.contract.ids import NodeId
from fleetstart.runtime.contract.node.orders import WorkerStatus

from ..drivers.prefork_pool import Spares
from ..drivers.worker_logs import Logs
from ..network.egress_proxy import Egress
from ..network.ingress_proxy import Doorways
from ..segments.store import Segments
from ..stage_links.relay import Relays
from .bundles import Bundles
from .call_latency import Speeds
from .meter import Rows
from .secrets import Opener


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
