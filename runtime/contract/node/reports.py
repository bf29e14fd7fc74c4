"""What nodes and gateways say of themselves in Redis; each report exists only under its writer's lease.

They are renewed with the lease and published, so that nobody polls (see `orders` for what passes between them).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ..ids import CheckpointId, NodeId, WorkerId
from .speed import Speed


class SegmentReport(msgspec.Struct, frozen=True):
    checkpoint: CheckpointId
    state: Literal["filling", "partial", "ready", "failed"]
    """`partial` has all that anybody asked for, and not all there is: a stage's chunks, and what came of others."""
    size_bytes: int
    """Of the whole checkpoint; a stage takes less memory."""
    ready_bytes: int
    ranges: list[tuple[int, int]] = []
    """(begin, end) of the chunks that are there."""
    counted_unix_ns: int = 0
    """When they were counted, if somebody waits for more; else 0, so that reports stay the same while nothing comes."""


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a node's segments."""

    pages: Literal["hugetlb", "thp", "small"] = "small"
    slab_bytes: int = 0
    used_bytes: int = 0
    free_bytes: int = 0
    """Made already, and used by nobody."""
    refused: dict[str, str] = {}
    """Better kinds of pages, and why the machine does not give them."""


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a node is and has. It exists in Redis only under the node's lease."""

    node: NodeId
    epoch: str
    """New at each start of the daemon."""
    address: str
    memory_bytes: int
    """What workers and segments together may use."""
    memory_used_bytes: int
    cpus: int
    segments: list[SegmentReport] = []
    isolation: str = ""
    limits: str = ""
    """How limits are enforced: "cgroup v1", "cgroup v2" or "watched"."""
    profiles: list[str] = []
    """Pools of workers whose fork server, or other launcher, is warm."""
    isolations: list[str] = []
    """By which its workers can be shut in, beyond namespaces; also while their launcher still tries whether it can."""
    pid: int = 0
    public_key: str = ""
    """What secrets for its workers are sealed with (`sealed`); new with each epoch."""
    weights_memory: MemoryReport = MemoryReport()
    bytes_per_s: dict[str, float] = {}
    """How fast each source of weights was when it was last used: "store", "disk"."""
    fetched_bytes: dict[str, int] = {}
    """What each gave since the daemon began."""
    waived_ms: dict[str, int] = {}
    """Of its workers' time since then, what nobody pays for, by phase."""
    kept_nusd: int = 0
    """What the idle time of workers cost since then that were kept because of `min`."""
    disk_bytes: int = 0
    """Of checkpoints that are kept on the node's disk."""
    disk: dict[CheckpointId, list[tuple[int, int]]] = {}
    """(begin, end) of the chunks that the disk has of each."""
    region: str = ""
    """Where it is, if it says so."""
    egress_bytes: dict[str, int] = {}
    """That workers exchanged with what their lists name, since the daemon began: "in", "out"."""
    egress_refused: int = 0
    """Connections that their lists do not allow, since then."""
    speeds: dict[str, Speed] = {}
    """Keyed `name@version`, of those that were called here of late."""


class FunctionLoad(msgspec.Struct, frozen=True):
    """One gateway's view of one version. Derived from its live queue and calls, never counted up and down."""

    queued: int
    running: int
    per_worker: dict[WorkerId, int] = {}
    arrived: int = 0
    """Calls so far, since the gateway knows the version: what came lately predicts what will come."""
    call_s: float = 0.0
    """How long a call keeps its place on a worker; 0 while none has ended."""
    oldest_unix_ms: int = 0
    """When the call that waits longest was accepted; 0 if none waits."""
    oldest: str = ""
    """Its id."""


class GatewayReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one gateway has waiting and running; exists only under its lease."""

    gateway: str
    loads: dict[str, FunctionLoad] = {}
    """Keyed `name@version`."""
