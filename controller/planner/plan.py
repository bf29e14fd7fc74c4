"""Plans: the planner's request and its result, with stages, predictions and the candidates considered.

Plans are stored with the invocation that caused them, so that `fs explain` can print them later, from any controller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from fleetstart.runtime.contract.errors import ErrorInfo
from fleetstart.runtime.contract.function.spec import MEMORY_MIN_BYTES, SLO, Isolation
from fleetstart.runtime.contract.ids import CheckpointId, FunctionName, LayerId, NodeId
from fleetstart.runtime.contract.node.devices import DeviceShare
from fleetstart.runtime.contract.node.peers import Pull
from fleetstart.runtime.contract.node.speed import ModeSwitch

from .checkpoint_layout import CheckpointLayout, Cut
from .constraints import NO_CONSTRAINTS, PlacementConstraints
from .error_margins import PRIOR_MARGINS, Margins
from .estimates import VersionMeasures
from .multicast.plan import MulticastCandidate


class PeerShare(NamedTuple):
    """Bytes that a fetch takes from one peer."""

    node: NodeId
    size_bytes: int


class StagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A worker of the plan. The first stage of a pipeline has both ends of the model."""

    node: NodeId
    region: str = ""
    """The node's region; empty if it has none."""
    epoch: str
    first: int
    end: int
    """Layers first .. end - 1; 0, 1 of a model without numbered layers."""
    full: bool
    """True if it has a whole worker's memory, and so may become one."""
    devices: tuple[DeviceShare, ...] = ()
    """The node's devices that it computes on; none: the host."""
    memory_bytes: int
    """The worker's own limit: the spec's, or what is left of it without the other layers' KV cache."""
    reserved_bytes: int
    """The worker's own memory, and the growth of the node's segment."""
    missing_bytes: int
    """Weights neither in the node's memory nor being fetched."""
    store_bytes: int
    """The part of `missing_bytes` that must come from the store."""
    peers: list[PeerShare] = []
    """The part of it that other nodes give. The rest is on the node's disk."""
    pulls: list[Pull] = []
    """Its part of a multicast, by the places of `peers`."""
    files_bytes: int = 0
    """Packages and volumes of the function that the node does not have: they come from the store, too, and start with
    them."""
    fetch_s: float
    fetch_within_s: float | None = None
    """Deadline of the fetch, after the order; None: no promise."""

    @property
    def peer_bytes(self) -> int:
        return sum(share.size_bytes for share in self.peers)


class CandidateReport(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate that was considered, as `fs explain` prints it."""

    kind: Literal["start", "multicast"] = "start"
    """A multicast starts `full` whole workers, each by itself."""
    stages: int
    full: int
    nodes: list[NodeId]
    """The candidate's nodes; empty if there were not enough with room, and the figures are then 0."""
    missing_bytes: int = 0
    """Weights that it fetches before its first token; the others are in host memory or on their way."""
    store_bytes: int = 0
    peer_bytes: int = 0
    """The parts of them that come from the store and from other nodes; the rest is on the disks."""
    ttft_s: float = 0.0
    margin: float = 1.0
    """Factor on `ttft_s` before it is compared with the SLO."""
    tpot_s: float = 0.0
    cost_gib_s: float = 0.0
    why_not: str = ""
    """Reason for not taking it; empty for the one that was taken."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The decision about one start."""

    stages: list[StagePlan]
    """The workers to order; empty if no node can take one now, and `error` has the reason."""
    together: bool = True
    """True if they are the stages of one pipeline; if not, each is a whole worker."""
    multicast: str = ""
    """The kind of multicast that brings their weights; empty: none."""
    ways: list[MulticastCandidate] = []
    """The ways to send that were compared for the multicast."""
    pipelines: list[list[int]] = []
    """Workers of a multicast that serve together until they are whole, by their places in `stages`, in the order of
    layers; each is in one at most."""
    serve_s: list[float] = []
    """When each worker of a multicast serves, from the decision, in rising order; a pipeline counts as one."""
    ttft_s: float = 0.0
    """Predicted, from the decision."""
    margin: float = 1.0
    """Error margin of the prediction (`error_margins`)."""
    sequential_ttft_s: float = 0.0
    """TTFT of the same start without overlapping (eq. 1), for comparison."""
    ready_s: float = 0.0
    """The part of `ttft_s` until all stages have started and have their weights."""
    tpot_s: float = 0.0
    """Predicted, while the pipeline is one."""
    cost_gib_s: float = 0.0
    whole_s: float = 0.0
    """Time from the first token until whole workers can take over."""
    meets_slo: bool = True
    reason: str
    regions: list[str] = []
    isolation: Isolation = "namespaces"
    """Its constraints; only nodes that satisfy them were considered. No region: any."""
    considered: list[CandidateReport] = []
    decided_unix_ms: int = 0
    """Time of the decision by the scheduler's clock; the planner has none."""
    whole_unix_ms: int = 0
    """Time at which its pipeline had become whole workers, written when observed; 0 until then, and for a single
    worker."""
    switch: ModeSwitch | None = None
    """How the first stage took running requests over then; None before, and without any."""
    wait_s: float = 0.0
    """Time to postpone the start by, if it could then keep its SLO."""
    error: ErrorInfo | None = None


class FileTree(NamedTuple):
    """A function's packages, or the version of a volume."""

    id: LayerId
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A request for workers of one version."""

    function: FunctionName
    layout: CheckpointLayout
    memory_bytes: int
    """A whole worker's own, weights not counted."""
    checkpoint: CheckpointId | None = None
    trees: tuple[FileTree, ...] = ()
    """Its packages and volumes, which a node must have on its disk before it starts a worker."""
    kv_bytes: int = 0
    """Part of `memory_bytes` that goes with the layers."""
    measures: VersionMeasures
    speeds: Mapping[str, float] = field(default_factory=dict)
    """Compute speed of devices by type, for those that have none of their own."""
    margins: Margins = PRIOR_MARGINS
    slo: SLO | None = None
    waited_s: float = 0.0
    """Time that its oldest call has waited already."""
    patient: bool = True
    """True if the start may be postponed until links are free, if that keeps its SLO."""
    workers: int = 1
    """Whole workers that the start should become."""
    missing: int = 1
    """Whole workers that are wanted in all, which one multicast may start."""
    chunks: int = 0
    """Chunks of the checkpoint; 0 if they are not known."""
    most: int = 1
    """Maximum number of workers of the function, which later calls may need."""
    wanted: PlacementConstraints = NO_CONSTRAINTS
    """Constraints on its nodes."""
    on_device: bool = False
    """True if all of its weights and its KV cache lie in device memory, if it asks for devices: a model that the
    platform runs."""

    @property
    def segment_bytes(self) -> int:
        return self.layout.total_bytes if self.checkpoint is not None else 0

    def device_bytes(self, cut: Cut) -> int:
        """Device memory that a stage needs for its weights and its part of the KV cache; 0 if its handler decides."""
        if self.wanted.devices is None or not self.on_device:
            return 0
        return cut.size_bytes + round(self.kv_bytes * cut.share)

    def own_bytes(self, cut: Cut, *, full: bool, kv_on_device: bool = False) -> int:
        """A worker's own memory; a low-memory worker has no KV cache for the layers of other stages. On a GPU the
        cache is in device memory, and none of the worker's own."""
        if full or kv_on_device:
            return self.memory_bytes
        least_bytes = min(MEMORY_MIN_BYTES, self.memory_bytes)
        return max(least_bytes, self.memory_bytes - round(self.kv_bytes * (1 - cut.share)))
