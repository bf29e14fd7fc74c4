"""Messages between the processes of a node, over socketpairs (`channel.Channel`).

*Daemon and fork server*: `Fork` with two descriptors (the worker's control socket, the write end of its log pipe) is
answered by `Forked` or `ForkFailed`; later comes `Exited`. A launcher that cannot start any worker here
says `LauncherUnavailable`.

*Daemon and worker* share the worker's control socket. A pooled worker says `Pooled` and waits for `Assign`
(descriptors: the listening socket, the stream for commits if it may write a volume (`volume_stream`), a stage's socket
for its links, then control block and slabs of each segment if there are weights). If its function's egress is limited
to a list, it says `EgressListener` before it runs any code of the function, with one descriptor: a listening socket on
its own loopback, where the node accepts requests for connections out. It may say `WantChunks` when it waits for weights
out of order, answers `Ready` or `StartError`, sends `Usage` about once a second, and on `Drain` finishes its calls,
says `Drained` and exits. The end of the socket is the end of the worker, from either side.

A ready worker of a language model may be told to `StandBy`: it finishes its calls, gives weights and KV memory back and
says `StoodBy`; its process, with modules and context, stays. `Wake` makes it take them again (`Woken`, or
`StartError`).

A waiting worker may be told to `Prepare` for a version that has packages of its own: it is confined, imports what the
version imported before, says `Prepared` and waits for the `Assign` of that version. A worker with packages tells which
of their modules it has (`Imported`): when it is ready, and when it was drained.

A stage of a pipeline is given its connections to the others (`Peers`) and may be ordered to become a whole worker
(`Consolidate`, answered by `Consolidated`): see `orders`. A container gets its bundle as a tar after its listening
socket. Inside gVisor a listening socket would be of no use: there a
worker gets its bundle in its place, as a tar, and each connection by itself (`ClientConnection`).

*Daemon and reader of a segment*, a process of the daemon's own user that it has not started, such as `vllm serve`: over
a connection to `READERS_SOCKET` the reader says `ReadSegment`, is answered by `SegmentLent` (descriptors: control block
and slabs) and says `SegmentRead` when it has copied what it needs, which `SegmentVerified` answers. `ReadRefused` may
answer either. The segment stays until the connection ends.
"""

from __future__ import annotations

import msgspec

from ..errors import ErrorInfo
from ..function.spec import FunctionSpec
from ..function.volume import MountedVolume
from ..identity import Identity
from ..ids import CheckpointId, Version, WorkerId
from ..timeline import Timeline
from ..weights.stage import Stage
from .devices import DeviceId
from .orders import SecondEngine
from .speed import ModeSwitch, Speed

# ── daemon and fork server ─────────────────────────────────────────────────────────────────────────


class Fork(msgspec.Struct, frozen=True, tag="fork"):
    worker: WorkerId
    cgroup_procs: list[str] = []
    """Files into which the child writes itself before it runs anything."""
    network: bool = False
    folders: dict[str, str] = {}
    """Folders of the node by their path in the sandbox, which must see them from its beginning; others get them with
    their assignment."""
    profile: str = ""
    """Profile to import first, where the launcher does not serve one profile only."""
    image: str = ""
    """Image of the container; empty: the generic one."""
    gpus: list[str] = []
    """GPUs that the container sees, by their UUID."""


class CheckImage(msgspec.Struct, frozen=True, tag="check_image"):
    """Asks whether the image of a worker's container is still the one that its name means."""

    worker: WorkerId


class ImageChecked(msgspec.Struct, frozen=True, tag="image_checked"):
    worker: WorkerId
    current: bool
    """False also if the engine lacks the image by now, or cannot tell."""


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    worker: WorkerId
    pid: int
    """The process id in the daemon's namespace."""
    isolation: str


class ForkFailed(msgspec.Struct, frozen=True, tag="fork_failed"):
    worker: WorkerId
    reason: str
    hint: str = ""
    refused: bool = False
    """True if its function asks for what this node has not, so that trying again is of no use."""


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    worker: WorkerId
    status: int
    """Exit status as of os.waitstatus_to_exitcode: negative is a signal."""


class LauncherReady(msgspec.Struct, frozen=True, tag="warm"):
    """The launcher is ready: it has imported the libraries of its profile."""

    profile: str
    isolation: str
    refused: str = ""
    """The reason, if namespaces are not used."""


class LauncherUnavailable(msgspec.Struct, frozen=True, tag="refused"):
    """The launcher cannot start workers on this machine, with the reason."""

    reason: str


LauncherRequest = Fork | CheckImage
ForkServerMessage = Forked | ForkFailed | Exited | ImageChecked | LauncherReady | LauncherUnavailable

# ── daemon and worker ──────────────────────────────────────────────────────────────────────────────


class Pooled(msgspec.Struct, frozen=True, tag="pooled"):
    started_ns: int
    """Monotonic time at which the worker's own code began to run."""


class DeviceBinding(msgspec.Struct, frozen=True, kw_only=True):
    """Devices and cores of a worker's process, on a node that has devices; without any, it computes on the host."""

    devices: tuple[DeviceId, ...] = ()
    visible: str = ""
    """Its CUDA_VISIBLE_DEVICES; empty: it sees no GPU."""
    fractions: tuple[float, ...] = ()
    """The part of each visible GPU's memory that it may allocate."""
    cores: tuple[int, ...] = ()
    """Cores of its CPU devices; empty: all."""
    files: tuple[str, ...] = ()
    """Device files of the GPUs that it sees; one that is empty is not known, and it sees all."""
    cores_of: tuple[tuple[int, ...], ...] = ()
    """For each device, its cores; empty ones for a GPU."""


class DeviceLoaded(msgspec.Struct, frozen=True, kw_only=True):
    """Weights that a worker has moved to its devices until it was ready."""

    size_bytes: int = 0
    busy_ns: int = 0
    """Time with at least one move in progress; what it waited for weights is left out."""


class Assign(msgspec.Struct, frozen=True, tag="assign", kw_only=True):
    """Assigns a function to a pooled worker. Descriptors: the listening socket (inside gVisor the
    bundle; in a container followed by the bundle), the ring of
    entered calls, the stream for commits if it may write a volume, a stage's socket for its links, and each segment's
    control block and slabs."""

    worker: WorkerId
    version: Version
    spec: FunctionSpec
    bundle_dir: str
    """Folder of the unpacked bundle, read-only to the worker."""
    layer_dir: str = ""
    """Folder of its installed packages, read-only to the worker at the same path; empty: it has none."""
    volumes: list[MountedVolume] = []
    """Volumes, each with its folder on the node, read-only to the worker."""
    token: str
    threads: int
    """Cores that the worker may use."""
    secrets: dict[str, str] = {}
    """Secrets as environment variables; never in a log, an error or an answer."""
    slabs: list[int] = []
    """Number of slabs of each segment: that of the weights, then those of the adapters."""
    stage: Stage | None = None
    secret: str = ""
    link_identity: Identity | None = None
    """The pipeline's own, for a stage's links that leave the machine."""
    shell: bool = False
    """True if the worker serves a shell instead of the function."""
    user: int = 0
    """User id that the worker takes; 0: it keeps the daemon's."""
    binding: DeviceBinding | None = None
    """None on a node without devices."""


class Prepare(msgspec.Struct, frozen=True, tag="prepare", kw_only=True):
    """Prepares a waiting worker for one version, ahead of a call: everything of its start that needs no secret and runs
    none of the function's own code. Descriptor: for a container the packed bundle, of which its assignment then has
    none; its packages are mounted before."""

    spec: FunctionSpec
    bundle_dir: str
    layer_dir: str
    modules: list[str]
    """Modules of the layer to import, in this order."""
    threads: int
    """Cores that the worker may use."""
    user: int = 0
    """User id that the worker takes; 0: it keeps the daemon's."""
    binding: DeviceBinding | None = None
    """As in `Assign`."""


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    pass


class Imported(msgspec.Struct, frozen=True, tag="imported"):
    """The modules of its layer that a worker has imported, in their order."""

    modules: list[str]


class EgressListener(msgspec.Struct, frozen=True, tag="outlet"):
    """Hands the node a listening socket on the worker's own loopback, for its egress proxy. Descriptor: that socket."""


class WantChunks(msgspec.Struct, frozen=True, tag="want"):
    """Requests chunks first .. last (inclusive) of the first segment before others: the worker waits for them."""

    first: int
    last: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    timeline: Timeline
    loaded: DeviceLoaded = DeviceLoaded()


class StartError(msgspec.Struct, frozen=True, tag="start_error"):
    error: ErrorInfo
    timeline: Timeline


class Usage(msgspec.Struct, frozen=True, tag="usage"):
    """Counters since the worker was ready: calls begun, calls in progress, and time with at least one in progress."""

    calls: int
    running: int
    busy_ns: int
    speed: Speed | None = None
    """Mean latencies; None until a call has ended."""
    second_engine: SecondEngine | None = None
    """The engine that comes up behind the first one; None without one."""


class ClientConnection(msgspec.Struct, frozen=True, tag="caller"):
    """Hands over a client's connection, for a worker that cannot listen on a reachable address. Descriptor: the
    socket."""


class Peers(msgspec.Struct, frozen=True, tag="peers"):
    """Hands a stage its connections for sending. Descriptors: one for each of these stages."""

    stages: list[int]


class Consolidate(msgspec.Struct, frozen=True, tag="grow"):
    """Orders a stage to become a whole worker. The rest of the checkpoint is being fetched."""


class Consolidated(msgspec.Struct, frozen=True, tag="whole"):
    """The stage is a whole worker: it has all layers, and the KV cache that its running requests need."""

    switch: ModeSwitch | None = None
    """How it got this cache; None if it had no requests of others to go on with."""


class StandBy(msgspec.Struct, frozen=True, tag="stand_by"):
    """Orders a worker to finish its calls and to give its weights and KV memory back."""


class StoodBy(msgspec.Struct, frozen=True, tag="stood_by"):
    pass


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Ends a standby."""


class Woken(msgspec.Struct, frozen=True, tag="woken"):
    pass


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    grace_s: float


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    pass


WorkerMessage = (
    Pooled
    | Prepared
    | Imported
    | EgressListener
    | WantChunks
    | Ready
    | StartError
    | Usage
    | Consolidated
    | StoodBy
    | Woken
    | Drained
)
DaemonMessage = Assign | Prepare | ClientConnection | Peers | Consolidate | StandBy | Wake | Drain

# ── daemon and reader of a segment ─────────────────────────────────────────────────────────────────

READERS_SOCKET = "node/segments.sock"
"""Path of the daemon's socket below its FS_HOME."""


class ReadSegment(msgspec.Struct, frozen=True, tag="read"):
    """Asks for the segment of a checkpoint, which is fetched if it is not there."""

    checkpoint: CheckpointId


class SegmentLent(msgspec.Struct, frozen=True, tag="lent"):
    """Hands over a segment, possibly still filling. Descriptors: control block and slabs."""


class SegmentRead(msgspec.Struct, frozen=True, tag="read_end"):
    """Asks that what was read is what was published, before it is used."""


class SegmentVerified(msgspec.Struct, frozen=True, tag="verified"):
    pass


class ReadRefused(msgspec.Struct, frozen=True, tag="read_refused"):
    error: ErrorInfo


ReaderMessage = ReadSegment | SegmentRead
LenderMessage = SegmentLent | SegmentVerified | ReadRefused
