"""Facts of the Redis server by its INFO, and what in its settings is wrong for a system like this. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CLIENTS_SHARE = 0.8
"""Share of `maxclients` beyond which the next controllers and nodes may be refused."""
WAITAOF_SINCE = (7, 2)
CLUSTER = "it runs in cluster mode, and one change here writes several keys: use one without (cluster-enabled no)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    version: str
    """Of the commands: Valkey names the Redis that it is like."""
    used_bytes: int
    limit_bytes: int
    """`maxmemory`; without one, half of the machine's memory."""
    limited: bool
    """True if there is a `maxmemory`."""
    policy: str
    evicted_keys: int
    log: bool
    """True if there is an append-only file."""
    cluster: bool
    clients: int
    clients_max: int


def facts_of(info: Mapping[str, Any]) -> ServerFacts:
    """Reads INFO. What a managed server leaves out counts as right."""
    most = int(info.get("maxmemory", 0))
    return ServerFacts(
        version=str(info.get("redis_version", "")),
        used_bytes=int(info.get("used_memory", 0)),
        limit_bytes=most or int(info.get("total_system_memory", 0)) // 2,
        limited=bool(most),
        policy=str(info.get("maxmemory_policy", "noeviction")),
        evicted_keys=int(info.get("evicted_keys", 0)),
        log=bool(int(info.get("aof_enabled", 1))),
        cluster=bool(int(info.get("cluster_enabled", 0))),
        clients=int(info.get("connected_clients", 0)),
        clients_max=int(info.get("maxclients", 0)),
    )


def settings_problems(facts: ServerFacts) -> list[str]:
    """What is wrong, each with what to do."""
    found = []
    if facts.cluster:
        found.append(CLUSTER)
    if facts.policy != "noeviction":
        lost = f"{facts.evicted_keys:,} keys are lost already" if facts.evicted_keys else "none is lost yet"
        found.append(
            f"maxmemory-policy is {facts.policy}: when it is full it drops keys of any kind, functions and ledger too "
            f"({lost}); CONFIG SET maxmemory-policy noeviction"
        )
    if not facts.log:
        found.append(
            "appendonly is no: after its crash accepted async calls, booked rows, keys and functions are gone; "
            "CONFIG SET appendonly yes"
        )
    elif _number(facts.version) < WAITAOF_SINCE:
        found.append(
            f"Redis {facts.version} has no WAITAOF, and cannot say what is on its disk: its crash loses up to two "
            "seconds of booked rows; use 7.2 or newer"
        )
    if facts.clients_max and facts.clients > CLIENTS_SHARE * facts.clients_max:
        found.append(
            f"{facts.clients:,} of {facts.clients_max:,} connections are open, and a controller opens up to 114; "
            "raise maxclients, and the server's limit of open files"
        )
    return found


def _number(version: str) -> tuple[int, int]:
    """The first two numbers; a version that is not understood counts as new."""
    first, _, rest = version.partition(".")
    second = rest.partition(".")[0]
    return (int(first), int(second)) if first.isdecimal() and second.isdecimal() else WAITAOF_SINCE
