"""Every message between two processes, as structs that are validated once, at the door.

Three conversations:

*Controller and node* meet in Redis. The controller writes a `WorkerOrder` for each worker that it wants
(desired state); the node writes a `WorkerStatus` for each worker that it has (observed state) and renews
a `NodeReport` under its lease. Each write is also published, so that nobody polls; a full read a second
makes up for a lost publication. An order is addressed to a node *and its epoch*: a daemon that was
restarted answers an order of its predecessor's epoch with a `gone` status, and never runs it.

*Daemon and fork server* share a socketpair (`channel.Channel`): `Fork` with two descriptors (the worker's
control socket, the write end of its log pipe) is answered by `Forked` or `ForkFailed`; later comes `Exited`.

*Daemon and worker* share the worker's control socket. A pooled worker says `Pooled` and waits for `Assign`
(descriptors: the listening socket, a stage's second one for its links, then control block and slabs of each segment
if there are weights). It may say `Want` when it waits for weights out of order,
answers `Ready` or `StartError`, sends `Usage` about once a second, and on `Drain` finishes its calls, says
`Drained` and exits. The end of the socket is the end of the worker, from either side.

The stages of a pipeline are workers with orders of their own, which name the pipeline. Each node opens its stage's
listening socket at once and tells of it in the first status (`link`). The scheduler puts the links that it has heard
of into the orders (`peers`), and each node connects to them and hands the connections on (`Peers`): workers need no
network of their own. A node that cannot connect to another says so (`relayed`), carries its worker's bytes through the
object store, and the other one hears of that in its order. Only the first stage gets calls; it is ready when all are. A
stage whose order says `grow` takes the rest of the checkpoint in behind its back, and says `Whole` when it needs the
others no longer.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from fleetstart.runtime.contract.errors import ErrorInfo
from fleetstart.runtime.contract.function import FunctionSpec
from fleetstart.runtime.contract.ids import CheckpointId, FunctionName, NodeId, Version, WorkerId
from fleetstart.runtime.contract.sealed import Sealed
from fleetstart.runtime.contract.stage import Stage
from fleetstart.runtime.contract.timeline import Timeline

# ── controller and node, through Redis ─────────────────────────────────────────────────────────────


class WorkerOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Desired: this worker shall run (or finish) on that node."""

    worker: WorkerId
    node: NodeId
    epoch: str
    version: Version
    spec: FunctionSpec
    wanted: Literal["run", "drain"] = "run"
    ordered_unix_ns: int
    """Of this order; an order that is changed has a later one."""
    decided_unix_ns: int = 0
    """Of the worker's first order, which decided its start; 0 of one that an older scheduler gave."""
    cause: str = ""
    """The call for which it was ordered; empty if there is none. Lines of its start stand in the log for that call."""
    fetch_by_unix_ns: int = 0
    """Its weights shall be here by then for the promise with which it was planned; 0: there is none."""
    stage: Stage | None = None
    """None: the whole model."""
    secret: str = ""
    """Of the pipeline: the first words on each link between its stages."""
    peers: tuple[str, ...] = ()
    """host:port of each stage's links, by index; "" for one that is not known yet, NO_PEER for one that will not be."""
    relayed: tuple[int, ...] = ()
    """Stages whose nodes cannot reach this one: what they send comes through the object store."""
    grow: bool = False
    """Whether a stage shall become a whole worker."""
    sealed: Sealed | None = None
    """The secrets that its function declares, which nobody but its node can read."""


NO_PEER = "-"

WorkerState = Literal["starting", "ready", "draining", "gone", "failed"]
"""`gone` ended as it should (drained, ordered away, its daemon restarted); `failed` did not. Both are final."""

FINAL: frozenset[WorkerState] = frozenset({"gone", "failed"})


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Observed: what became of an order. Kept until the order is taken back, then forgotten."""

    worker: WorkerId
    node: NodeId
    function: FunctionName
    version: Version
    state: WorkerState
    start: Literal["warm", "cold"] = "cold"
    """cold if weights had to be fetched for it, warm if they lay in host memory already (or none are needed)."""
    pooled: bool = False
    """Whether its process had been forked before the order came."""
    isolation: str = ""
    """Namespaces that the worker has, for example "mnt,pid,ipc,uts,net"; empty for a plain process."""
    endpoint: str = ""
    """host:port, once ready."""
    token: str = ""
    """Secret that a call to the endpoint must carry (TOKEN_HEADER)."""
    link: str = ""
    """host:port where the other stages of its pipeline reach it."""
    whole: bool = True
    """Whether it needs no other worker: a stage that has grown does not."""
    relayed: tuple[int, ...] = ()
    """Stages of its pipeline that its node could not connect to: what it sends them goes through the object store."""
    fetched: dict[str, int] = {}
    """Bytes of its weights by where they came from ("store", "disk"), once its start is over."""
    error: ErrorInfo | None = None
    timeline: Timeline = msgspec.field(default_factory=Timeline)
    changed_unix_ns: int = 0


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


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """How quick calls are on a worker that is ready: running means of the last ones."""

    calls: int
    """That they come from: since the worker was ready, or, in a node's report, since its daemon began."""
    call_s: float
    """How long a call keeps its place."""
    prefill_s: float
    """Until its first token; of a handler of the user's own, until its answer."""
    decode_s: float | None = None
    """Each token after the first; None if there was none."""
    stages: int = 1
    """Of the pipeline that computed the last of them."""


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
    """Profiles whose fork server is warm."""
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


# ── daemon and fork server ─────────────────────────────────────────────────────────────────────────


class Fork(msgspec.Struct, frozen=True, tag="fork"):
    worker: WorkerId
    cgroup_procs: list[str] = []
    """Files into which the child writes itself before it runs anything."""
    network: bool = False


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    worker: WorkerId
    pid: int
    """As the daemon sees it."""
    isolation: str


class ForkFailed(msgspec.Struct, frozen=True, tag="fork_failed"):
    worker: WorkerId
    reason: str


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    worker: WorkerId
    status: int
    """As of os.waitstatus_to_exitcode: negative is a signal."""


class Warm(msgspec.Struct, frozen=True, tag="warm"):
    """The fork server has imported what its profile asks for."""

    profile: str
    isolation: str
    refused: str = ""
    """Why namespaces are not used, if they are not."""


ForkServerMessage = Forked | ForkFailed | Exited | Warm

# ── daemon and worker ──────────────────────────────────────────────────────────────────────────────


class Pooled(msgspec.Struct, frozen=True, tag="pooled"):
    started_ns: int
    """Monotonic time at which the worker's own code began to run."""


class Assign(msgspec.Struct, frozen=True, tag="assign", kw_only=True):
    """Descriptors with it: listening socket, a stage's for its links, of each segment its control block and slabs."""

    worker: WorkerId
    version: Version
    spec: FunctionSpec
    bundle_dir: str
    """Folder of the unpacked bundle, read-only to the worker."""
    token: str
    threads: int
    """Cores that the worker may use."""
    secrets: dict[str, str] = {}
    """Environment variables beside the spec's own; in no log, no error, no answer."""
    slabs: list[int] = []
    """Of each segment, how many: that of the weights, then that of their adapter."""
    stage: Stage | None = None
    secret: str = ""


class Want(msgspec.Struct, frozen=True, tag="want"):
    """The worker waits for these chunks (inclusive) of its first segment: they should come before others."""

    first: int
    last: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    timeline: Timeline


class StartError(msgspec.Struct, frozen=True, tag="start_error"):
    error: ErrorInfo
    timeline: Timeline


class Usage(msgspec.Struct, frozen=True, tag="usage"):
    """Since the worker was ready: calls begun, calls under way, and time with at least one under way."""

    calls: int
    running: int
    busy_ns: int
    speed: Speed | None = None
    """None until a call has ended."""


class Peers(msgspec.Struct, frozen=True, tag="peers"):
    """Descriptors with it: a connection to each of these stages, to send on."""

    stages: list[int]


class Grow(msgspec.Struct, frozen=True, tag="grow"):
    """The rest of the checkpoint is on its way."""


class Whole(msgspec.Struct, frozen=True, tag="whole"):
    """The worker has all layers and what its running requests need of the others' memory."""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    grace_s: float


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    pass


WorkerMessage = Pooled | Want | Ready | StartError | Usage | Whole | Drained
DaemonMessage = Assign | Peers | Grow | Drain

# ── gateway and worker: HTTP/1.1 on the worker's endpoint ──────────────────────────────────────────

TOKEN_HEADER = "fs-worker-token"
REQUEST_HEADER = "x-request-id"
TRACEPARENT_HEADER = "traceparent"
TRACESTATE_HEADER = "tracestate"
DEADLINE_HEADER = "fs-deadline-ms"
"""Milliseconds that the call may still take, from when the worker reads it."""
ATTEMPT_HEADER = "fs-attempt"
"""1 for the first worker that is given the call, and one more for each after it."""
DRAINING_HEADER = "fs-draining"
"""On a 503 of a worker that takes no more calls: nothing was run, send it elsewhere."""
BUSY_HEADER = "fs-busy"
"""On a 503 of a worker whose slots are taken: nothing was run, send it elsewhere or wait."""
ERROR_HEADER = "fs-error"
"""Error code, on responses that the platform made; absent on responses that the handler made."""
CONTINUE_HEADER = "fs-continue"
"""On a request: so many bytes at the end of its body are marks of an answer that another worker began and could not
end; with 0, the call begins. On a response: this stream has marks."""
MARK = b": fs-mark "
"""Begins a comment of an event stream, which the gateway keeps and takes out: with all marks so far, any worker of the
version can go on after the events before this one. What it says is the worker's own matter; a blank line ends it."""
