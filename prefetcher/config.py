"""The node daemon's configuration: built once in `__main__` from the environment, passed down by constructor."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fleetstart.runtime.contract.errors import InvalidSpec
from fleetstart.runtime.contract.function.public_addresses import Network
from fleetstart.runtime.contract.function.setting_checks import check_region
from fleetstart.runtime.contract.function.spec import Isolation, pool_name
from fleetstart.runtime.contract.identity import is_loopback
from fleetstart.runtime.contract.ids import NodeId
from fleetstart.runtime.contract.node.devices import parse_declared
from fleetstart.runtime.contract.process.environment import (
    ConfigError,
    read_choice,
    read_flag,
    read_int,
    read_links,
    read_log_format,
    read_networks,
    read_required,
    read_size,
    read_store,
)
from fleetstart.runtime.contract.process.log_format import LogFormat
from fleetstart.runtime.contract.process.redis_url import with_ca
from fleetstart.runtime.contract.sizes import GIB, MIB
from fleetstart.runtime.contract.store_url import is_s3

from .sources.http_settings import HttpSettings, http_settings

PROFILES = {"python": None, "torch": "torch"}
"""Worker profile → module that must be installed for it. The daemon looks for the module and never imports it."""
PRELOADS = (("torch", "transformers"), ("torch", "vllm"))
"""Worker profile, and a library that a fork server of its own imports beside it once a function needs it."""
PRELOADED = tuple(f"{profile}:{library}" for profile, library in PRELOADS)
RUNSC = "runsc"
"""Name of gVisor's program."""
SANDBOXES: tuple[Isolation, ...] = ("gvisor", "container")
POOLS = (*PROFILES, *(pool_name(profile, isolation) for isolation in SANDBOXES for profile in PROFILES))
ISOLATIONS = ("required", "best-effort")
WORKER_UIDS = "2000000000-2000065535"
"""Default range of FS_ISOLATION_UIDS: above those of systemd (to 1,879,048,191), as many as a node has functions."""
UID_MOST = (1 << 32) - 2
MEMORY_SHARE = 0.8
"""Default share of the machine's memory that the node uses; the rest is for the system, the controller and Redis."""
KEEP_BYTES = GIB
KEEP_SHARE = 8
"""Prefaulted memory is at most one part in so many of the node's memory, so that a small machine keeps its own."""
FETCH_THREADS, FETCH_THREADS_MOST = 8, 32
DISK_CACHE_BYTES = 50 * GIB
"""Default budget of the disk cache: a handful of large models. The last gigabyte of the disk stays free."""

LAYER_CACHE_BYTES = 20 * GIB
"""Default budget of layers on the disk: a few with torch, dozens without."""
VOLUME_CACHE_BYTES = 20 * GIB
"""Default budget of volumes on the disk."""

WORKER_ENV = (
    *("PATH", "HOME", "LANG", "LC_", "TZ", "TMPDIR", "PYTHON", "VIRTUAL_ENV", "LD_LIBRARY_PATH"),
    *("CUDA_", "NVIDIA_", "OMP_", "MKL_", "OPENBLAS_"),
    *(
        "SSL_CERT_",
        "REQUESTS_CA_BUNDLE",
        "http_proxy",
        "https_proxy",
        "no_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
    ),
)
"""Prefixes of the environment variables that workers inherit: those of Python, its libraries and the network."""


CPU_LIMIT_LEAST, CPU_LIMIT_MOST = 0.05, 1024
"""Less than a twentieth of a processor, and starts take minutes."""
_CPUS = re.compile(r"\d{1,4}(\.\d{1,3})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of one node daemon."""

    home: Path
    redis_url: str
    store: str
    node: NodeId
    address: str
    memory_bytes: int
    pool_size: int
    profiles: tuple[str, ...]
    cpus: int
    parent_death: bool
    watch_only: bool
    """Enforce memory limits by polling, even where control groups could be used (FS_LIMITS=watched)."""
    preloaded: tuple[str, ...] = ()
    """Profiles with a library whose fork servers are launched with the node, such as "torch:vllm" (FS_PROFILES)."""
    best_effort: bool = False
    """Run workers as plain processes where the kernel refuses namespaces (FS_ISOLATION=best-effort)."""
    worker_uids: range = range(0)
    """User ids for functions, one each, where the daemon may give them; empty: workers keep the daemon's."""
    cpu_limit: float = 0.0
    """Processors that one worker may use at most (FS_CPU_LIMIT); 0: all, which workers share evenly."""
    container_engine: str = ""
    """Address of the API of a container engine (FS_CONTAINER_ENGINE); empty: the node makes no containers."""
    egress_deny: tuple[Network, ...] = ()
    """Ranges that no function reaches through the egress proxy, beside those that none ever does."""
    egress_allow: tuple[Network, ...] = ()
    """Ranges that functions may list although they are denied."""
    plain_links: bool = False
    """Let controllers on other machines reach workers without TLS (FS_LINKS=plain)."""
    rdma: bool = True
    """Read from other nodes by RDMA where both have a device and links are plain. FS_RDMA=0 turns it off."""
    servers: str = ""
    """URLs of the controllers, which functions do not reach either."""
    worker_env: Mapping[str, str]
    """Environment of fork servers, and so of workers: no setting and no secret of the node."""
    http: HttpSettings = field(default_factory=HttpSettings)
    keep_bytes: int = 0
    """Memory for weights that is prefaulted, so that the first cold start does not wait for the kernel to zero it."""
    keep_idle: bool = True
    """Keep weights in memory when no worker uses them. FS_KEEP_WEIGHTS=0 turns it off, to measure cold starts."""
    disk_cache_bytes: int = 0
    """Budget of the disk cache; 0 where the store is a folder, which is on a disk already."""
    layer_cache_bytes: int = LAYER_CACHE_BYTES
    """Budget of the packages of functions on the disk."""
    volume_cache_bytes: int = VOLUME_CACHE_BYTES
    """Budget of volumes on the disk."""
    fetch_threads: int = FETCH_THREADS
    """Concurrent connections to the object store."""
    region: str = ""
    """Region of the node, which functions may require."""
    leaf: str = ""
    """Leaf switch or rack of the node, which multicasts cross as seldom as they can."""
    gpus: int = 0
    """Number of GPUs that workers see."""
    devices: tuple[int, ...] = ()
    """Memory of each CPU device (FS_DEVICES)."""
    find_gpus: bool = True
    """Look for GPUs; FS_DEVICES=none does not."""
    log_format: LogFormat = "text"
    shutdown_grace_s: float = 2.0
    """Time for invocations in progress at shutdown; short, because `fs down` should feel immediate."""

    @property
    def needs_certificate(self) -> bool:
        """Checks whether controllers on other machines reach its workers, and so over TLS."""
        return not is_loopback(self.address) and not self.plain_links

    @property
    def worker_threads(self) -> int:
        """Threads that a worker's libraries compute with: more than it has processors would wait for each other."""
        return min(self.cpus, math.ceil(self.cpu_limit)) if self.cpu_limit else self.cpus

    @property
    def state_dir(self) -> Path:
        return self.home / "node"


def read_config(env: Mapping[str, str]) -> Config:
    """Reads the configuration from environment variables. Errors: ConfigError, naming the variable."""
    memory_bytes = read_size(env, "FS_NODE_MEMORY", _memory_share_bytes())
    cpus = len(os.sched_getaffinity(0))
    return Config(
        home=Path(read_required(env, "FS_HOME")).absolute(),
        redis_url=with_ca(_redis_url(read_required(env, "FS_REDIS_URL")), env.get("FS_REDIS_CA") or ""),
        store=read_store(env, "FS_STORE"),
        node=NodeId(env.get("FS_NODE") or socket.gethostname()),
        address=env.get("FS_NODE_ADDRESS") or "127.0.0.1",
        memory_bytes=memory_bytes,
        keep_bytes=read_size(env, "FS_POOL_MEMORY", min(KEEP_BYTES, memory_bytes // KEEP_SHARE)),
        keep_idle=read_choice(env, "FS_KEEP_WEIGHTS", ("0", "1")) != "0",
        disk_cache_bytes=read_size(env, "FS_DISK_CACHE", DISK_CACHE_BYTES) if is_s3(env["FS_STORE"]) else 0,
        layer_cache_bytes=read_size(env, "FS_LAYER_CACHE", LAYER_CACHE_BYTES),
        volume_cache_bytes=read_size(env, "FS_VOLUME_CACHE", VOLUME_CACHE_BYTES),
        pool_size=read_int(env, "FS_POOL_SIZE", 1, most=64),
        profiles=_profiles(env.get("FS_PROFILES") or ",".join(POOLS), env.get("FS_CONTAINER_ENGINE") or ""),
        container_engine=_container_engine(env.get("FS_CONTAINER_ENGINE") or ""),
        preloaded=_preloaded(env.get("FS_PROFILES") or ""),
        cpus=cpus,
        http=http_settings(env),
        worker_env={name: value for name, value in env.items() if name.startswith(WORKER_ENV)},
        watch_only=read_choice(env, "FS_LIMITS", ("watched",)) == "watched",
        best_effort=read_choice(env, "FS_ISOLATION", ISOLATIONS) == "best-effort",
        cpu_limit=_cpu_limit(env.get("FS_CPU_LIMIT") or ""),
        worker_uids=_worker_uids(env.get("FS_ISOLATION_UIDS", "") or WORKER_UIDS),
        egress_deny=read_networks(env, "FS_EGRESS_DENY"),
        egress_allow=read_networks(env, "FS_EGRESS_ALLOW"),
        plain_links=read_links(env) == "plain",
        rdma=read_choice(env, "FS_RDMA", ("0", "1")) != "0",
        servers=env.get("FS_URL") or "",
        parent_death=read_flag(env, "FS_PARENT_DEATH"),
        gpus=_gpus(env),
        devices=_devices(env.get("FS_DEVICES", ""), memory_bytes),
        find_gpus=env.get("FS_DEVICES", "").strip() != "none",
        region=_place(env, "FS_REGION"),
        leaf=_place(env, "FS_LEAF"),
        log_format=read_log_format(env),
        fetch_threads=read_int(env, "FS_FETCH_THREADS", default_fetch_threads(cpus), least=1, most=64),
    )


def _cpu_limit(text: str) -> float:
    if not text:
        return 0.0
    if not _CPUS.fullmatch(text) or not CPU_LIMIT_LEAST <= float(text) <= CPU_LIMIT_MOST:
        raise ConfigError(
            f"FS_CPU_LIMIT={text[:40]!r} must be a number of processors from {CPU_LIMIT_LEAST} to {CPU_LIMIT_MOST}"
        )
    return float(text)


def _worker_uids(text: str) -> range:
    first, dash, last = text.partition("-")
    if text == "none":
        return range(0)
    numbers = [int(part) for part in (first, last) if part.isascii() and part.isdecimal() and len(part) <= 10]
    if not dash or len(numbers) != 2 or not 0 < numbers[0] <= numbers[1] <= UID_MOST:
        raise ConfigError(
            f"FS_ISOLATION_UIDS is {text!r}: write the first and the last user id, for example {WORKER_UIDS}, or none"
        )
    return range(numbers[0], numbers[1] + 1)


def _place(env: Mapping[str, str], name: str) -> str:
    """A region or a leaf switch, which are written alike."""
    text = env.get(name, "")
    try:
        if text:
            check_region(text)
    except InvalidSpec as error:
        raise ConfigError(f"{name}: {error}") from error
    return text


def _devices(text: str, memory_bytes: int) -> tuple[int, ...]:
    try:
        sizes = parse_declared(text)
    except InvalidSpec as error:
        raise ConfigError(f"FS_DEVICES: {error}: {error.hint}") from error
    if sum(sizes) > memory_bytes:
        raise ConfigError(
            f"FS_DEVICES: CPU devices have {sum(sizes) // MIB} MiB together, and the node has "
            f"{memory_bytes // MIB} MiB (FS_NODE_MEMORY), of which they are a part"
        )
    return sizes


def _gpus(env: Mapping[str, str], dev: Path = Path("/dev")) -> int:
    """The number of GPUs, by their device files: asking torch takes seconds, and memory that stays."""
    files = len([file for file in dev.glob("nvidia*") if file.name.removeprefix("nvidia").isdecimal()])
    found = files or int(any((dev / name).exists() for name in ("kfd", "dxg")))
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    return min(found, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


def _redis_url(url: str) -> str:
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise ConfigError(f"FS_REDIS_URL is {url!r}: it must begin with redis://, rediss:// or unix://")
    return url


def _memory_share_bytes() -> int:
    return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * MEMORY_SHARE)


def default_fetch_threads(cpus: int) -> int:
    """Four threads a core: some verify checksums while the others receive, and round trips to the store overlap."""
    return min(FETCH_THREADS_MOST, max(FETCH_THREADS, 4 * cpus))


def _container_engine(address: str) -> str:
    if address and not address.startswith(("unix:///", "http+unix://")):
        raise ConfigError(
            f"FS_CONTAINER_ENGINE is {address!r}: write the engine's unix socket, for example "
            "unix:///var/run/docker.sock; an engine on another machine cannot run this node's workers"
        )
    return address


def _profiles(text: str, container_engine: str) -> tuple[str, ...]:
    """The requested profiles that this installation can serve. One with a library counts as its base profile, too."""
    offers = {"": True, "gvisor": shutil.which(RUNSC) is not None, "container": bool(container_engine)}
    pools = [name.partition("+") for name in dict.fromkeys(name.partition(":")[0] for name in _named(text))]
    return tuple(
        profile + plus + isolation for profile, plus, isolation in pools if _installed(profile) and offers[isolation]
    )


def _preloaded(text: str) -> tuple[str, ...]:
    """The requested profiles with a library."""
    return tuple(name for name in _named(text) if name in PRELOADED)


def _named(text: str) -> list[str]:
    asked = [name.strip() for name in text.split(",") if name.strip()]
    known = (*POOLS, *PRELOADED)
    if unknown := [name for name in asked if name not in known]:
        raise ConfigError(f"FS_PROFILES names {unknown[0]!r}; known are {', '.join(known)}")
    return asked


def _installed(profile: str) -> bool:
    module = PROFILES[profile]
    return module is None or importlib.util.find_spec(module) is not None
