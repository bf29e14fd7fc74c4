"""What a decision says: who runs which stage, what is expected of it, and what else was considered.

These are kept with the invocation that caused them, so that `fs explain` can print them later, from any controller.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from fleetstart.runtime.contract.errors import ErrorInfo
from fleetstart.runtime.contract.function.spec import SLO, Isolation
from fleetstart.runtime.contract.ids import CheckpointId, FunctionName, NodeId

from .checkpoint_layout import CheckpointLayout, Cut
from .constraints import NO_CONSTRAINTS, PlacementConstraints
from .error_margins import PRIOR_MARGINS, Margins
from .estimates import VersionMeasures


class StagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of the plan. The first stage of a pipeline has both ends of the model."""

    node: NodeId
    region: str = ""
    """Where the node is, if it says so."""
    epoch: str
    first: int
    end: int
    """Layers first .. end - 1; 0, 1 of a model without numbered layers."""
    full: bool
    """Whether it has a whole worker's memory, and so may grow into one."""
    memory_bytes: int
    """The worker's own limit: the spec's, or what is left of it without the other layers' KV cache."""
    reserved_bytes: int
    """Own memory and what the node's segment must take in."""
    missing_bytes: int
    """Of weights, not in the node's memory and not on their way there."""
    store_bytes: int
    """Of those, what must come from the store."""
    fetch_s: float
    fetch_within_s: float | None = None
    """The promise: after the order. None: there is none."""


class CandidateReport(msgspec.Struct, frozen=True, kw_only=True):
    stages: int
    full: int
    nodes: list[NodeId]
    """Empty if there were not enough with room; the figures are then 0."""
    ttft_s: float = 0.0
    margin: float = 1.0
    """What it is multiplied by before it is held to be within the SLO."""
    tpot_s: float = 0.0
    cost_gib_s: float = 0.0
    why_not: str = ""
    """Empty of the one that was taken."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    stages: list[StagePlan]
    """None if no node can take a worker now; `error` says why."""
    ttft_s: float = 0.0
    """Predicted, from the decision."""
    margin: float = 1.0
    """Of the prediction: `margins`."""
    sequential_ttft_s: float = 0.0
    """The same start, if its parts did not overlap (eq. 1): for comparison."""
    ready_s: float = 0.0
    """Of it, until its stages have started and have their weights."""
    tpot_s: float = 0.0
    """Predicted, while the pipeline is one."""
    cost_gib_s: float = 0.0
    whole_s: float = 0.0
    """From the first token until whole workers can take over."""
    meets_slo: bool = True
    reason: str
    regions: list[str] = []
    isolation: Isolation = "namespaces"
    """In which it may run; none: anywhere. Only nodes there were looked at."""
    considered: list[CandidateReport] = []
    decided_unix_ms: int = 0
    """By the clock of whoever ordered it; the planner has none."""
    whole_unix_ms: int = 0
    """When its pipeline was one whole worker; 0 of a single worker, and until then. Noted when it is observed."""
    wait_s: float = 0.0
    """After which a start could keep its SLO, if it is worth waiting for."""
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """One version that needs workers."""

    function: FunctionName
    shape: CheckpointLayout
    memory_bytes: int
    """A whole worker's own, weights not counted."""
    checkpoint: CheckpointId | None = None
    kv_bytes: int = 0
    """Part of `memory_bytes` that goes with the layers."""
    measures: VersionMeasures
    margins: Margins = PRIOR_MARGINS
    slo: SLO | None = None
    waited_s: float = 0.0
    """How long its oldest call has waited already."""
    patient: bool = True
    """Whether it may wait for links to be free, if that keeps its SLO."""
    workers: int = 1
    """Whole workers that are wanted of this start in the end."""
    most: int = 1
    """That its function may ever have: so many more calls may make of its helpers."""
    wanted: PlacementConstraints = NO_CONSTRAINTS
    """In which it may run; none: anywhere."""

    @property
    def segment_bytes(self) -> int:
        return self.shape.total_bytes if self.checkpoint is not None else 0

    def own_bytes(self, cut: Cut, *, full: bool) -> int:
        """A low-memory worker does without the KV cache of the layers that others have."""
        return self.memory_bytes if full else self.memory_bytes - round(self.kv_bytes * (1 - cut.share))
