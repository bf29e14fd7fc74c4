"""Heartbeat reports of nodes and gateways in Redis; each report exists only under its writer's lease.

Reports are renewed with the lease and published, so that no polling is needed.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ..function.layer import packages_for
from ..ids import CheckpointId, LayerId, NodeId, WorkerId
from .devices import DeviceReport
from .peers import Transport
from .speed import Speed


class SegmentReport(msgspec.Struct, frozen=True):
    checkpoint: CheckpointId
    state: Literal["filling", "partial", "ready", "failed"]
    """`partial` has all that anybody asked for, and not all there is: a stage's chunks, and what came of others."""
    size_bytes: int
    """Size of the whole checkpoint; a stage takes less memory."""
    ready_bytes: int
    ranges: list[tuple[int, int]] = []
    """(begin, end) of the chunks that are there."""
    counted_unix_ns: int = 0
    """Time of the count while chunks are awaited; else 0, so that reports stay equal while nothing changes."""


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a node's segments."""

    pages: Literal["hugetlb", "thp", "small"] = "small"
    slab_bytes: int = 0
    used_bytes: int = 0
    free_bytes: int = 0
    """Memory that is prefaulted and unused."""
    refused: dict[str, str] = {}
    """Better kinds of pages, and why the machine does not give them."""


Confinement = Literal["namespaces", "plain", "none"]
"""What a node runs workers without gVisor in: namespaces, plain processes as its operator allows, or nothing: it takes
no such worker."""
ISOLATION_ADVICE = (
    "let the node's kernel give it namespaces (run it as root or with CAP_SYS_ADMIN, or sysctl "
    "kernel.unprivileged_userns_clone=1; in a container, a seccomp profile that allows unshare and mount), or set "
    "FS_ISOLATION=best-effort on the node if each function may read what the node's user may read, its keys included"
)


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """A node's heartbeat: its capacity, its segments and its counters."""

    node: NodeId
    epoch: str
    """New at each start of the daemon."""
    machine: str = ""
    """The machine's boot and process namespace, in which `pid` counts; empty if it is not known."""
    address: str
    memory_bytes: int
    """Memory for workers and segments together."""
    memory_used_bytes: int
    preloaded_bytes: int = 0
    """Memory of packages that were imported ahead of calls. It is not part of `memory_used_bytes`: a start that needs
    it gets it."""
    cpus: int
    segments: list[SegmentReport] = []
    isolation: str = ""
    confines: Confinement = "namespaces"
    """"namespaces" also while its fork server still probes: a worker that could not be confined does not start."""
    isolation_refused: str = ""
    """The call that its kernel refused, and why; empty if the isolation is whole."""
    limits: str = ""
    """Enforcement of memory limits: "cgroup v1", "cgroup v2" or "watched"."""
    profiles: list[str] = []
    """Pools of workers whose fork server, or other launcher, is warm."""
    pools: list[str] = []
    """Pools of workers that it can start; empty: a node of an earlier release, which does not say."""
    gpus: int = 0
    """Number of GPUs that its workers can use: there the KV cache of a model lies in device memory."""
    devices: tuple[DeviceReport, ...] = ()
    """Devices that its workers may be given; GPUs among them stand in `gpus`, too."""
    isolations: list[str] = []
    """Supported isolations beyond namespaces, also while a launcher still probes its own."""
    pid: int = 0
    public_key: str = ""
    """Public key that secrets for its workers are sealed with; new with each epoch."""
    weights_memory: MemoryReport = MemoryReport()
    peer_address: str = ""
    """host:port where other nodes read its chunks; empty if it serves none."""
    peer_host: str = ""
    """Name in its certificate that its readers expect; empty: it serves without TLS."""
    peer_transports: tuple[Transport, ...] = ()
    """Transports by which it serves, the best first."""
    peer_sent_bytes: int = 0
    """Bytes of chunks that other nodes have read here since the daemon started."""
    bytes_per_s: dict[str, float] = {}
    """Measured bandwidth of each source of weights: "store", "disk", "peer" for all peers, "peer:NODE" for each of
    those that were read from last; and of "layers", with the time to write them."""
    measured: dict[str, float] = {}
    """Bytes a second of "store", "disk" and "memory", as the node measured them when it came up."""
    fetched_bytes: dict[str, int] = {}
    """Bytes fetched from each source since the daemon started."""
    waived_ms: dict[str, int] = {}
    """Unbilled time of its workers since the daemon started, by phase."""
    kept_nusd: int = 0
    """Cost since the daemon started of the idle time of workers kept because of `min`."""
    disk_bytes: int = 0
    """Size of the checkpoints in the node's disk cache."""
    disk: dict[CheckpointId, list[tuple[int, int]]] = {}
    """(begin, end) of the chunks that the disk has of each."""
    region: str = ""
    """The node's region; empty if it has none."""
    leaf: str = ""
    """The leaf switch, or rack, that it is connected to; empty if it does not say."""
    egress_bytes: dict[str, int] = {}
    """Bytes through the egress proxy since the daemon started: "in", "out"."""
    egress_refused: int = 0
    """Connections that their lists do not allow, since then."""
    layers: list[LayerId] = []
    """Layers of packages on the node's disk, those that were used last first, a few hundred at most."""
    volumes: list[LayerId] = []
    """Versions of volumes on the node's disk, likewise."""
    python: str = ""
    """The Python of its workers, such as "cpython-311": layers are built for one."""
    platform: str = ""
    speeds: dict[str, Speed] = {}
    """Keyed `name@version`, of those that were called here of late."""

    @property
    def runs(self) -> str:
        """Its Python and platform in words, as layers name theirs; empty if it does not say."""
        return packages_for(self.python, self.platform)


ARRIVALS_S = 10.0
"""Time over which recent calls are counted: a burst fits into it, and it is forgotten before a pipeline has
consolidated."""


class FunctionLoad(msgspec.Struct, frozen=True):
    """Load of one version at one gateway. Derived from its live queue and calls, never counted up and down."""

    queued: int
    running: int
    per_worker: dict[WorkerId, int] = {}
    recent: int = 0
    """Calls that came in the last ARRIVALS_S seconds: what came lately predicts what will come."""
    call_s: float = 0.0
    """Mean time that a call keeps its slot; 0 while none has ended."""
    oldest_unix_ms: int = 0
    """Acceptance time of the oldest queued call; 0 if the queue is empty."""
    oldest: str = ""
    """Invocation id of the oldest queued call."""


class GatewayReport(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway's heartbeat: its load by version."""

    gateway: str
    loads: dict[str, FunctionLoad] = {}
    """Keyed `name@version`."""
