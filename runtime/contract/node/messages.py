"""What a node's processes say to each other over socketpairs (`channel.Channel`).

*Daemon and fork server*: `Fork` with two descriptors (the worker's control socket, the write end of its log pipe) is
answered by `Forked` or `ForkFailed`; later comes `Exited`. A launcher that cannot start any worker here
says `LauncherUnavailable`.

*Daemon and worker* share the worker's control socket. A pooled worker says `Pooled` and waits for `Assign`
(descriptors: the listening socket, a stage's second one for its links, then control block and slabs of each segment
if there are weights). If its function's egress is limited to a list, it says `EgressListener` before it runs any code
of the function, with one descriptor: a listening socket on its own loopback, where the node accepts requests for
connections out. It may say `WantChunks` when it waits for weights out of order, answers `Ready` or `StartError`, sends
`Usage` about once a second, and on `Drain` finishes its calls, says `Drained` and exits. The end of the socket is the
end of the worker, from either side.

A stage of a pipeline is given its connections to the others (`Peers`) and may be ordered to become a whole worker
(`Consolidate`, answered by `Consolidated`): see `orders`. Inside gVisor a listening socket would be of no use: there a
worker gets its bundle in its place, as a tar, and each connection by itself (`ClientConnection`).
"""

from __future__ import annotations

import msgspec

from ..errors import ErrorInfo
from ..function.spec import FunctionSpec
from ..ids import Version, WorkerId
from ..timeline import Timeline
from ..weights.stage import Stage
from .speed import Speed

# ── daemon and fork server ─────────────────────────────────────────────────────────────────────────


class Fork(msgspec.Struct, frozen=True, tag="fork"):
    worker: WorkerId
    cgroup_procs: list[str] = []
    """Files into which the child writes itself before it runs anything."""
    network: bool = False
    profile: str = ""
    """What it shall have imported, of a launcher that does not bring one profile itself."""


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


class LauncherReady(msgspec.Struct, frozen=True, tag="warm"):
    """The fork server has imported what its profile asks for."""

    profile: str
    isolation: str
    refused: str = ""
    """Why namespaces are not used, if they are not."""


class LauncherUnavailable(msgspec.Struct, frozen=True, tag="refused"):
    """There will be no workers from here on this machine: why."""

    reason: str


ForkServerMessage = Forked | ForkFailed | Exited | LauncherReady | LauncherUnavailable

# ── daemon and worker ──────────────────────────────────────────────────────────────────────────────


class Pooled(msgspec.Struct, frozen=True, tag="pooled"):
    started_ns: int
    """Monotonic time at which the worker's own code began to run."""


class Assign(msgspec.Struct, frozen=True, tag="assign", kw_only=True):
    """Descriptors with it: listening socket (inside gVisor, the bundle), a stage's for its links, of each segment its
    control block and slabs."""

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
    shell: bool = False
    """Whether it serves a terminal instead of the function."""


class EgressListener(msgspec.Struct, frozen=True, tag="outlet"):
    """Descriptor with it: a listening socket of the worker's own loopback, which is the node's from now on."""


class WantChunks(msgspec.Struct, frozen=True, tag="want"):
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


class ClientConnection(msgspec.Struct, frozen=True, tag="caller"):
    """Descriptor with it: a caller's connection, for a worker that cannot listen where callers would find it."""


class Peers(msgspec.Struct, frozen=True, tag="peers"):
    """Descriptors with it: a connection to each of these stages, to send on."""

    stages: list[int]


class Consolidate(msgspec.Struct, frozen=True, tag="grow"):
    """The rest of the checkpoint is on its way."""


class Consolidated(msgspec.Struct, frozen=True, tag="whole"):
    """The worker has all layers and what its running requests need of the others' memory."""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    grace_s: float


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    pass


WorkerMessage = Pooled | EgressListener | WantChunks | Ready | StartError | Usage | Consolidated | Drained
DaemonMessage = Assign | ClientConnection | Peers | Consolidate | Drain
