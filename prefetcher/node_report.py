"""The node's report to the scheduler, gathered from all parts of the daemon."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fleetstart.runtime.contract.function.layer import own_platform, own_python
from fleetstart.runtime.contract.node.reports import Confinement, NodeReport

from .config import Config
from .network.served_socket import why_unfiltered
from .peers.node_peers import NodePeers
from .processes.control_groups.groups import Cgroups
from .processes.epoch import machine_id
from .processes.forked_process import has_own_network
from .processes.forkserver_client import ForkServer
from .processes.prefork_policy import is_preloaded, is_unsandboxed
from .workers.node_services import NodeServices


def report_of(
    config: Config,
    epoch: str,
    services: NodeServices,
    *,
    workers_bytes: int,
    preloaded_bytes: int,
    servers: Mapping[str, ForkServer],
    cgroups: Cgroups | None,
    measured: Mapping[str, float],
    peers: NodePeers,
) -> NodeReport:
    """Builds the report: capacity, usage, segments, isolation, measured bandwidths and call latencies."""
    segments, layers, egress = services.segments, services.layers, services.egress.traffic
    warm = {name: server.warm for name, server in servers.items() if server.warm is not None}
    confines, refused = confinement(servers)
    return NodeReport(
        node=config.node,
        epoch=epoch,
        machine=machine_id(),
        address=config.address,
        memory_bytes=config.memory_bytes,
        memory_used_bytes=workers_bytes + segments.budget.used_bytes,
        preloaded_bytes=preloaded_bytes,
        cpus=config.cpus,
        segments=segments.reports(),
        isolation=next((said.isolation for said in warm.values()), ""),
        confines=confines,
        isolation_refused=refused,
        limits=cgroups.name if cgroups is not None else "watched",
        profiles=sorted(pool for pool in warm if not is_preloaded(pool)),
        pools=sorted(config.profiles),
        gpus=config.gpus,
        devices=services.devices.reports(),
        isolations=sorted({pool.partition("+")[2] for pool, server in servers.items() if not server.refused} - {""}),
        pid=os.getpid(),
        public_key=services.decryptor.public_key,
        region=config.region,
        leaf=config.leaf,
        egress_bytes={"in": egress.received_bytes, "out": egress.sent_bytes},
        egress_refused=egress.rejected,
        weights_memory=segments.budget.memory.report(),
        peer_address=peers.address,
        peer_host=peers.host,
        peer_transports=peers.transports,
        peer_sent_bytes=peers.sent_bytes,
        bytes_per_s={**segments.bandwidths.bytes_per_s(), **layers.bandwidths.bytes_per_s()},
        measured=dict(measured),
        fetched_bytes=segments.fetched_bytes,
        waived_ms=services.ledger.waived_ms,
        kept_nusd=services.ledger.kept_nusd,
        disk_bytes=segments.disk_bytes,
        disk=segments.disk_ranges(),
        layers=layers.held(),
        volumes=services.volumes.cache.held(),
        python=own_python(),
        platform=own_platform(),
        speeds=services.latencies.report(),
    )


def confinement(servers: Mapping[str, ForkServer]) -> tuple[Confinement, str]:
    """What workers without gVisor are confined in, as their fork servers found, and what the kernel refused."""
    light = [server for pool, server in servers.items() if is_unsandboxed(pool)]
    if refused := next((server.refused for server in light if server.refused), ""):
        return "none", refused
    said = [server.warm for server in light if server.warm is not None]
    refused = next((one.refused for one in said if one.refused), "") or why_unfiltered()
    return ("namespaces" if all(has_own_network(one.isolation) for one in said) else "plain"), refused
