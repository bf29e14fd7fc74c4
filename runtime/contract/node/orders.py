"""What the controller wants of a node, and what became of it: they meet in Redis.

The controller writes a `WorkerOrder` for each worker that it wants (desired state); the node writes a `WorkerStatus`
for each worker that it has (observed state). Each write is also published, so that nobody polls; a full read a second
makes up for a lost publication. An order is addressed to a node *and its epoch*: a daemon that was restarted answers an
order of its predecessor's epoch with a `gone` status, and never runs it.

The stages of a pipeline are workers with orders of their own, which name the pipeline. Each node opens its stage's
listening socket at once and tells of it in the first status (`link`). The scheduler puts the links that it has heard
of into the orders (`peers`), and each node connects to them and hands the connections on (`messages.Peers`): workers
need no network of their own. A node that cannot connect to another says so (`relayed`), carries its worker's bytes
through the object store, and the other one hears of that in its order. Only the first stage gets calls; it is ready
when all are. A stage whose order says `grow` takes the rest of the checkpoint in behind its back, and says `whole` when
it needs the others no longer.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ..errors import ErrorInfo
from ..function.spec import FunctionSpec
from ..ids import FunctionName, NodeId, Version, WorkerId
from ..timeline import Timeline
from ..weights.stage import Stage
from .sealed_secrets import Sealed


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
    shell: bool = False
    """For a person and not for calls: its door is a terminal (`contract.terminal`). The controller that serves the
    session writes and takes back its order; schedulers leave it alone."""


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
    shell: bool = False
    """As its order says."""
