"""Container of the node's components that starting and serving a worker needs, passed to every `Worker`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fleetstart.runtime.contract.ids import NodeId
from fleetstart.runtime.contract.node.orders import WorkerStatus

from ..devices.allocation import DeviceAllocator
from ..layers.cache import LayerCache
from ..network.egress_proxy import NodeEgress
from ..network.ingress_proxy import NodeIngress
from ..network.tls_ingress import TlsIngress
from ..processes.prefork_pool import PreforkPool
from ..processes.worker_logs import LogBuffer
from ..segments.store import SegmentStore
from ..stage_links.relay import Relays
from ..volumes.session import VolumeNode
from .bundles import BundleCache
from .call_latency import CallLatencies
from .layer_spares import LayerSpares
from .meter import LedgerBuffer
from .secrets import SecretDecryptor


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeServices:
    """Components of the node that each worker uses."""

    node: NodeId
    address: str
    cpus: int
    devices: DeviceAllocator
    bundles: BundleCache
    layers: LayerCache
    layer_spares: LayerSpares
    volumes: VolumeNode
    segments: SegmentStore
    prefork_pool: PreforkPool
    logs: LogBuffer
    ledger: LedgerBuffer
    latencies: CallLatencies
    decryptor: SecretDecryptor
    egress: NodeEgress
    ingress: NodeIngress
    tls_ingress: Callable[[], TlsIngress | None]
    """None where controllers reach workers without TLS: over loopback, or as FS_LINKS=plain allows."""
    relays: Relays | None
    """None if the object store is a local folder: its nodes are on one machine and reach each other."""
    publish: Callable[[WorkerStatus], None]
