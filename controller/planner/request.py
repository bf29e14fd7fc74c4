"""What a start is asked for: the model and its memory, what is promised, and how many workers are wanted of it."""

from __future__ import annotations

from dataclasses import dataclass

from fleetstart.runtime.contract.function.spec import SLO
from fleetstart.runtime.contract.ids import CheckpointId, FunctionName

from .checkpoint_layout import Cut, Shape
from .constraints import ANYWHERE, Wanted
from .error_margins import UNKNOWN, Margins
from .estimates import VersionMeasures


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """One version that needs workers."""

    function: FunctionName
    shape: Shape
    memory_bytes: int
    """A whole worker's own, weights not counted."""
    checkpoint: CheckpointId | None = None
    kv_bytes: int = 0
    """Part of `memory_bytes` that goes with the layers."""
    measures: VersionMeasures
    margins: Margins = UNKNOWN
    slo: SLO | None = None
    waited_s: float = 0.0
    """How long its oldest call has waited already."""
    patient: bool = True
    """Whether it may wait for links to be free, if that keeps its SLO."""
    workers: int = 1
    """Whole workers that are wanted of this start in the end."""
    most: int = 1
    """That its function may ever have: so many more calls may make of its helpers."""
    wanted: Wanted = ANYWHERE
    """In which it may run; none: anywhere."""

    @property
    def segment_bytes(self) -> int:
        return self.shape.total_bytes if self.checkpoint is not None else 0

    def own_bytes(self, cut: Cut, *, full: bool) -> int:
        """A low-memory worker does without the KV cache of the layers that others have."""
        return self.memory_bytes if full else self.memory_bytes - round(self.kv_bytes * (1 - cut.share))
