"""A node that has joined a system: what it was told, kept in its FS_HOME, and the wait until it is in."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import InvalidInput, StartFailed
from fleetstart.runtime.contract.ids import NodeId
from fleetstart.runtime.contract.node.reports import NodeReport
from fleetstart.runtime.contract.store_url import is_s3

from ..home import HomeLayout, ServiceRecord, is_locked, read_record, read_services, start_ticks, tail
from .services import NODE

DEADLINE_S = 30.0
DEATHS_MAX = 2
"""Deaths of the node during its start after which it is given up: a name that is taken stays so."""
POLL_S = 0.05


class JoinRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `FS_HOME/join.json`. It holds the password of Redis: mode 0600."""

    url: str
    """URL of the controller that it joined by."""
    redis_url: str
    store: str
    node: str
    address: str
    """Address at which controllers and other nodes reach this node's workers."""
    region: str = ""
    """Empty: none, or not told to an earlier release."""
    node_memory: str = ""
    """Memory for workers and weights, such as "8GiB"; empty: the node's default."""

    def again(
        self, *, address: str | None = None, region: str | None = None, node_memory: str | None = None
    ) -> JoinRecord:
        """The record of the next start: what is given, else what is known. What is given as empty is taken away."""
        return msgspec.structs.replace(
            self,
            address=self.address if address is None else address or own_address(self.url),
            region=self.region if region is None else region,
            node_memory=self.node_memory if node_memory is None else node_memory,
        )


def join_file(layout: HomeLayout) -> Path:
    return layout.home / "join.json"


def read_join(layout: HomeLayout) -> JoinRecord | None:
    return read_record(join_file(layout), JoinRecord)


def write_join(layout: HomeLayout, record: JoinRecord) -> None:
    path = join_file(layout)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(record))
    fresh.replace(path)


def write_redis_ca(layout: HomeLayout, text: str) -> str:
    """Writes the certificates that Redis' own is checked by; returns the file, "" if there are none."""
    if not text:
        return ""
    path = layout.home / "redis-ca.pem"
    path.write_text(text)
    return str(path)


def own_address(url: str) -> str:
    """The address of this machine that packets to a server come from; nothing is sent."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 80
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise InvalidInput(
            f"the address of this machine towards {host} is not known: {error}", hint="name it with --address"
        ) from error


def check_store(store: str) -> None:
    """Errors: InvalidInput, if the store is a folder that this machine does not have."""
    if not is_s3(store) and not Path(store).is_dir():
        raise InvalidInput(
            f"the system's store is the folder {store}, which this machine does not have",
            hint="mount it here at the same path, or start the system with --store s3://BUCKET/PREFIX",
        )


def end_drain(record: JoinRecord) -> None:
    """Lets the node have workers again. It is written to Redis, not asked of a controller: in an upgrade nodes come
    first, and controllers of the release before have no request for it. A living node of this name at another address
    stays as it is: this one will be refused its name. Errors: StartFailed, if Redis fails."""
    import redis  # late: only a node that joins needs it

    node = NodeId(record.node)
    try:
        with redis.Redis.from_url(record.redis_url, socket_timeout=5, socket_connect_timeout=5) as client:
            report = _report_in(client.get(keys.node(node)))
            if report is not None and report.address != record.address:
                return
            if client.hdel(keys.NODES_DRAINING, node):
                client.publish(keys.EVENTS_FUNCTIONS, f"node:{node}")
    except redis.RedisError as error:
        raise StartFailed(f"node {node} may still be drained: Redis failed: {error}", hint="join once more") from error


def _report_in(data: object) -> NodeReport | None:
    """A node's report, as Redis has it; None if there is none, or one of a release that this one cannot read."""
    try:
        return msgspec.json.decode(data, type=NodeReport) if isinstance(data, bytes) else None
    except msgspec.MsgspecError:
        return None


def wait_joined(layout: HomeLayout, record: JoinRecord, pid: int) -> None:
    """Waits until the node's own process holds its lease. `pid`: the supervisor. Errors: StartFailed."""
    import redis  # late: only a node that joins needs it

    ends = time.monotonic() + DEADLINE_S
    with redis.Redis.from_url(record.redis_url, socket_timeout=5, socket_connect_timeout=5) as client:
        while time.monotonic() < ends:
            service = read_services(layout).get(NODE)
            if service is not None and service.deaths >= DEATHS_MAX:
                raise _failed(layout, f"the node ended {service.deaths} times while starting")
            if start_ticks(pid) is None and not is_locked(layout.lock):
                raise _failed(layout, "the supervisor ended")
            try:
                data = client.get(keys.node(NodeId(record.node)))
            except redis.RedisError:
                data = None
            report = _report_in(data)
            if report is not None and service is not None and _is_of(report, service, record):
                return
            time.sleep(POLL_S)
    raise _failed(layout, f"the node was not in after {DEADLINE_S:.0f} s")


def _is_of(report: NodeReport, service: ServiceRecord, record: JoinRecord) -> bool:
    return report.pid == service.pid and report.address == record.address


def _failed(layout: HomeLayout, reason: str) -> StartFailed:
    lines = [line for line in tail(layout.log(NODE), 20) if line.startswith("fleetstart node: ")]
    told = lines[-1].removeprefix("fleetstart node: ") if lines else ""
    return StartFailed(f"{reason}: {told}" if told else reason, hint=f"its log is {layout.log(NODE)}")
