"""Parts of the daemon that its configuration and this machine decide: caches, control groups, egress, fork servers
and their pool."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import resource
from collections.abc import Callable, Collection
from pathlib import Path
from urllib.parse import urlsplit

from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.identity import FILE
from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.node.reports import ISOLATION_ADVICE
from fleetstart.runtime.contract.process.environment import ConfigError
from fleetstart.runtime.contract.store_url import parse_store

from .concurrency.threads import IoThread
from .config import PRELOADS, Config
from .layers.cache import LayerCache
from .layers.kinds import VOLUME
from .network.egress_proxy import NodeEgress, egress_limits
from .network.node_identity import NodeCertificate, open_certificate
from .network.platform_addresses import PlatformAddresses, platform_hosts
from .processes.control_groups.groups import Cgroups
from .processes.control_groups.setup import open_cgroups, read_hierarchies
from .processes.forkserver_client import END_TIMEOUT_S, ForkServer
from .processes.prefork_policy import is_unsandboxed
from .processes.prefork_pool import PreforkPool
from .processes.read_budget import ReadBudget
from .processes.worker_uids import WorkerUids
from .segments.disk_cache import DiskCache
from .segments.feeds import OpenPeer
from .segments.store import SegmentStore
from .sources.base import Source

log = logging.getLogger(__name__)

CONTAINERS_END_S = 10.0
"""Time for the removal of a node's containers at its end, some tenths of a second each on a busy machine."""
CONTAINER_UIDS_PART = 4
"""Containers get one part in so many of FS_ISOLATION_UIDS, one id each; functions in namespaces have the rest."""
SHARED = ("bundles", "layers", "volumes")
"""Folders of the node's state that have what functions see of it."""


async def open_node_certificate(config: Config, stop: asyncio.Event) -> NodeCertificate | None:
    """The node's certificate; None if it has none and needs none, or is stopping. Errors: NodeRemoved; ConfigError if
    other machines reach this node, and it has none."""
    certificate = await open_certificate(
        config.node,
        config.state_dir / FILE,
        [server.strip() for server in config.servers.split(",") if server.strip()],
        needed=config.needs_certificate,
        stopped=stop.is_set,
    )
    if certificate is None and config.needs_certificate and not stop.is_set():
        raise ConfigError(
            f"FS_NODE_ADDRESS={config.address} is reached by other machines, and this node has no certificate: join "
            "the system (`fs node token` on the first machine, then fs node join URL), or set FS_LINKS=plain here and "
            "on the controllers if nobody else is on the network between them"
        )
    return certificate


def open_segments(
    config: Config,
    source: Source,
    *,
    workers_bytes: Callable[[], int],
    reclaim: Callable[[int], None],
    changed: Callable[[], None],
    reject: Callable[[Collection[WorkerId], FleetError], None],
    open_peer: OpenPeer,
) -> SegmentStore:
    """Weights in the node's memory, and its disk cache of them."""
    return SegmentStore(
        source=source,
        memory_bytes=config.memory_bytes,
        workers_bytes=workers_bytes,
        reclaim=reclaim,
        threads=config.fetch_threads,
        keep_bytes=config.keep_bytes,
        keep_idle=config.keep_idle,
        disk=_open_disk_cache(config),
        changed=changed,
        reject=reject,
        open_peer=open_peer,
    )


def _open_disk_cache(config: Config) -> DiskCache | None:
    if config.disk_cache_bytes == 0:
        return None
    try:
        return DiskCache(config.state_dir / "checkpoints", config.disk_cache_bytes)
    except OSError as error:
        log.warning("the disk cache cannot be used", extra={"error": str(error)})
        return None


def open_layers(config: Config, source: Source, give_up: Callable[[], None], changed: Callable[[], None]) -> LayerCache:
    """Packages of functions on the node's disk."""
    return LayerCache(
        folder=config.state_dir / "layers",
        source=source,
        budget_bytes=config.layer_cache_bytes,
        give_up=give_up,
        changed=changed,
    )


def open_volumes(config: Config, source: Source, changed: Callable[[], None]) -> LayerCache:
    """Versions of volumes on the node's disk."""
    return LayerCache(
        folder=config.state_dir / "volumes",
        source=source,
        budget_bytes=config.volume_cache_bytes,
        kind=VOLUME,
        changed=changed,
    )


def descriptor_limit() -> int:
    """The daemon's soft limit of descriptors."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def open_egress(config: Config, io_thread: IoThread) -> NodeEgress:
    """The proxy by which functions reach what they list."""
    platform = platform_hosts(config.redis_url, config.address, config.servers)
    addresses = PlatformAddresses(platform, operator=config.egress_deny, allowed=config.egress_allow)
    return NodeEgress(egress_limits(descriptor_limit()), io_thread, addresses)


def open_node_cgroups(epoch: str, config: Config) -> Cgroups | None:
    """The control groups of the daemon; None where it has none. Says so if they cannot hold a limit that is set."""
    found = None
    try:
        if not config.watch_only:
            own = Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text()
            found = open_cgroups(epoch, read_hierarchies(*own), config.cpu_limit)
    except (OSError, ValueError) as error:
        log.warning("control groups cannot be used: memory limits are enforced by polling", extra={"error": str(error)})
    if config.cpu_limit and not (found and found.limits_cpus):
        log.warning("FS_CPU_LIMIT does not hold here: no control group of processors", extra={"cpus": config.cpu_limit})
    return found


def fork_servers(config: Config, groups: bool, changed: Callable[[], None]) -> dict[str, ForkServer]:
    """The fork servers by worker pool: a warm parent for each profile, one launcher for all gVisor sandboxes, one for
    all containers, and those that are launched once a function needs their library."""
    hide = [argument for path in hidden_paths(config) for argument in ("--hide", path)]

    reads = ReadBudget()

    def server(module: str, *arguments: str, on_demand: bool = False) -> ForkServer:
        return ForkServer(
            module=f"fleetstart.runtime.launch.{module}",
            arguments=(*arguments, *hide),
            env=config.worker_env,
            changed=changed,
            reads=reads,
            on_demand=on_demand,
            advice=ISOLATION_ADVICE if module == "forkserver" else "",
            end_s={"forkserver": 0.0, "container": CONTAINERS_END_S}.get(module, END_TIMEOUT_S),
        )

    isolation = ["--isolation", "best-effort" if config.best_effort else "required"]
    for name in SHARED:
        isolation += ["--share", str(config.state_dir / name)]
    isolation += ["--root", str(worker_root(config)), "--user", str(next(iter(config.worker_uids), 0))]
    light = [pool for pool in config.profiles if is_unsandboxed(pool)]
    servers = {profile: server("forkserver", "--profile", profile, *isolation) for profile in light}
    for profile, library in PRELOADS:
        if profile in light and importlib.util.find_spec(library) is not None:
            arguments = ("--profile", profile, "--preload", library, *isolation)
            pool = f"{profile}:{library}"
            servers[pool] = server("forkserver", *arguments, on_demand=pool not in config.preloaded)
    # A sandbox's memory belongs to no single process: without control groups its limit could not be enforced.
    own: dict[str, list[str]] = {
        "gvisor": [],
        "container": ["--engine", config.container_engine, *_container_users(config)],
    }
    for sandbox, options in own.items() if groups else ():
        if pools := [pool for pool in config.profiles if pool.partition("+")[2] == sandbox]:
            launcher = server(sandbox, "--state", str(config.state_dir / sandbox), *options)
            servers |= dict.fromkeys(pools, launcher)
    return servers


def open_prefork_pool(
    config: Config, servers: dict[str, ForkServer], cgroups: Cgroups | None, starts_under_way: Callable[[], int]
) -> PreforkPool:
    """Processes forked ahead of workers' starts."""
    return PreforkPool(
        servers=servers,
        cgroups=cgroups,
        uids=WorkerUids(function_uids(config)),
        size=config.pool_size,
        starts_under_way=starts_under_way,
    )


def function_uids(config: Config) -> range:
    """The user ids of functions in namespaces: those of containers are left out, if the node makes any."""
    uids = config.worker_uids
    return uids[: len(uids) - len(uids) // CONTAINER_UIDS_PART] if config.container_engine else uids


def _container_users(config: Config) -> list[str]:
    """The user ids of containers, as arguments of their launcher: the end of the range, if there is one."""
    uids = config.worker_uids[len(function_uids(config)) :]
    return ["--users", str(uids.start), str(uids.stop)] if uids else []


def worker_root(config: Config) -> Path:
    """An empty folder, on which each fork server builds the root of its workers, seen by them alone."""
    folder = config.state_dir / "root"
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    return folder


def hidden_paths(config: Config) -> tuple[str, ...]:
    """Paths that no worker may see: the node's state, the store, and the folder of Redis' socket."""
    hidden = [str(config.home)]
    if isinstance(store := parse_store(config.store), Path):
        hidden.append(os.path.abspath(store))
    url = urlsplit(config.redis_url)
    if url.scheme == "unix" and len(Path(url.path).parent.parts) > 2:
        hidden.append(str(Path(url.path).parent))
    return tuple(dict.fromkeys(hidden))
