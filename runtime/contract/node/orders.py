"""Worker orders (desired state, written by the controller) and worker statuses (observed state, written by the node).

Both are stored in Redis. Each write is also published, so that no polling is needed; a full resync every second makes
up for a lost publication. An order is addressed to a node *and its epoch*: a daemon that was restarted answers an
order of its predecessor's epoch with a `gone` status, and never runs it.

The stages of a pipeline are workers with orders of their own, which name the pipeline. Each node opens its stage's
listening socket at once and reports its address in the first status (`link`). The scheduler copies the reported links
into the orders (`peers`), and each node connects to them and hands the connections over (`messages.Peers`): workers
need no network of their own. A node that cannot connect to another reports it (`relayed`) and carries its worker's
bytes through the object store; the other node learns of it from its order. Only the first stage gets calls; it is
ready when all are. A stage whose order has `grow` fetches the rest of the checkpoint in the background (pipeline
consolidation), and reports `whole` when it no longer needs the others.

A whole worker of a language model may be ordered to stand by (`wanted`): it gives weights and KV memory back, and its
node counts what is left of it. `run` wakes it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ..errors import ErrorInfo
from ..function.spec import FunctionSpec
from ..function.volume import Mounts
from ..ids import FunctionName, NodeId, Version, WorkerId
from ..timeline import Timeline
from ..weights.stage import Stage
from .devices import DeviceShare
from .entered_calls import EnteredCalls
from .peers import Peer, Pull
from .sealed_secrets import Sealed
from .speed import ModeSwitch


class WorkerOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Desired state of one worker: run, stand by, or drain, on one node."""

    worker: WorkerId
    node: NodeId
    epoch: str
    version: Version
    spec: FunctionSpec
    wanted: Literal["run", "standby", "drain"] = "run"
    ordered_unix_ns: int
    """Time of this order; a changed order has a later one."""
    decided_unix_ns: int = 0
    """Time of the worker's first order, which decided its start; 0 if an older scheduler wrote it."""
    cause: str = ""
    """The call that caused the start; empty if there is none. Log lines of the start are attributed to it."""
    fetch_by_unix_ns: int = 0
    """Deadline of the fetch for which its SLO was planned; 0: none."""
    stage: Stage | None = None
    """The stage of a pipeline; None: the whole model."""
    secret: str = ""
    """Shared secret of the pipeline: the first bytes on each link between its stages."""
    peers: tuple[str, ...] = ()
    """host:port of each stage's links, by index; "" for one that is not known yet, NO_PEER for one that will not be."""
    relayed: tuple[int, ...] = ()
    """Stages whose nodes cannot reach this one: what they send comes through the object store."""
    grow: bool = False
    """True if the stage is to become a whole worker."""
    sealed: Sealed | None = None
    """The secrets that its function declares, which only its node can decrypt."""
    mounts: Mounts | None = None
    """The volumes that its function names, in the versions that its worker gets."""
    sources: tuple[Peer, ...] = ()
    """Peers that hold chunks of its checkpoint; what none of them delivers comes from the node's disk and the store."""
    pulls: tuple[Pull, ...] = ()
    """Its part of a multicast plan, in order; empty: each chunk comes from whichever source is expected to deliver it
    soonest."""
    devices: tuple[DeviceShare, ...] = ()
    """Devices of its node that it computes on, and how much memory of each is its own; none: the host."""
    shell: bool = False
    """True if it is a shell worker, which serves a terminal (`node.shell`) and no calls. The controller that serves the
    session writes and takes back its order; schedulers leave it alone."""

    def changed(self, now_unix_ns: int, **fields: Any) -> WorkerOrder:
        """The order with other fields, and later than this one, also after the clock stepped back."""
        return msgspec.structs.replace(self, ordered_unix_ns=max(now_unix_ns, self.ordered_unix_ns + 1), **fields)


NO_PEER = "-"
WorkerState = Literal["starting", "ready", "standby", "draining", "gone", "failed"]
"""`standby`: its process stays, without weights and calls, until it is wanted again. `gone` ended as it should
(drained, ordered away, its daemon restarted); `failed` did not. Both are final."""
FINAL: frozenset[WorkerState] = frozenset({"gone", "failed"})


class SecondEngine(msgspec.Struct, frozen=True, kw_only=True):
    """The engine that comes up behind the first one of a worker (`LLMSettings.first`), as the worker says it."""

    engine: str
    state: Literal["waiting", "starting", "ready", "running", "failed"] = "waiting"
    """`waiting`: for the first token of the first engine. `ready`: it takes the next call. `running`: it has calls."""
    waited_ms: int = 0
    """Time from the first engine's start until this one's."""
    took_ms: int = 0
    """Time of its own start."""
    moved: int = 0
    """Running streams that moved to it."""
    error: str = ""
    """Why it did not come up."""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Observed: what became of an order. Kept until the order is taken back, then forgotten."""

    worker: WorkerId
    node: NodeId
    function: FunctionName
    version: Version
    state: WorkerState
    start: Literal["standby", "warm", "cold"] = "cold"
    """standby if it was woken; cold if weights had to be fetched for it, warm if they lay in host memory already (or
    none are needed)."""
    pooled: bool = False
    """True if its process came from the prefork pool."""
    isolation: str = ""
    """Namespaces that the worker has, for example "mnt,pid,ipc,uts,net"; empty for a plain process."""
    endpoint: str = ""
    """host:port, once ready."""
    token: str = ""
    """Secret that a call to the endpoint must carry (TOKEN_HEADER)."""
    link: str = ""
    """host:port where the other stages of its pipeline reach it."""
    whole: bool = True
    """True if it needs no other worker; true of a consolidated stage."""
    switch: ModeSwitch | None = None
    """How it took running requests over when it became a whole worker."""
    relayed: tuple[int, ...] = ()
    """Stages of its pipeline that its node could not connect to: what it sends them goes through the object store."""
    fetched: dict[str, int] = {}
    """Bytes of its weights by where they came from ("store", "disk"), once its start is over."""
    device_type: str = ""
    """Type of its devices; empty: it has none."""
    device_bytes: int = 0
    """Device memory that it has for itself."""
    second_engine: SecondEngine | None = None
    """The engine behind its first one; None: it has one engine."""
    memory_bytes: int = 0
    """Host memory that is left of it in standby; 0 otherwise: that of its function."""
    error: ErrorInfo | None = None
    timeline: Timeline = msgspec.field(default_factory=Timeline)
    changed_unix_ns: int = 0
    """Time of the change, for people; clocks step, so `number` says which status is newer."""
    number: int = 0
    """Order among the statuses of its daemon; 0 if it is of an earlier release."""
    shell: bool = False
    """True if it is a shell, as its order says."""
    served: bool = False
    """True if it was ever ready: its end is no failed start, also for a scheduler that was away meanwhile."""
    drained: bool = False
    """True if it ended in order, after it had finished every call that it had begun."""
    entered: EnteredCalls | None = None
    """The calls that it had entered, if it ended otherwise and its node knows."""

    def replaces(self, known: WorkerStatus) -> bool:
        """True if it is as new as a known status of the same worker, or newer. A worker ends once, and then for good;
        all that came before is of one daemon, which numbers it."""
        if known.state in FINAL:
            return False
        if self.state in FINAL:
            return True
        if self.number and known.number:
            return self.number >= known.number
        return self.changed_unix_ns >= known.changed_unix_ns
