"""Plans as the management API shows them: the forecast of a deploy, and the plan behind an invocation."""

from __future__ import annotations

import msgspec

from fleetstart.runtime.contract.billing.ledger import InvocationRow
from fleetstart.runtime.contract.errors import InvalidSpec
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import Version
from fleetstart.runtime.contract.weights.stage import LayerLayout

from ..planner.report import Explanation
from .functions import Prediction

SIZE_MAX_BYTES = 1 << 50


class Proposal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A version that is not there yet; its weights need not be in the store."""

    spec: FunctionSpec
    segment_bytes: int = 0
    layout: LayerLayout | None = None

    def __post_init__(self) -> None:
        sizes = [self.segment_bytes]
        if self.layout is not None:
            sizes += [self.layout.ends_bytes, *self.layout.layer_bytes]
        if not all(0 <= size_bytes <= SIZE_MAX_BYTES for size_bytes in sizes):
            raise InvalidSpec(f"forecast: sizes are 0 to {SIZE_MAX_BYTES} bytes")


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """What `fs deploy --dry-run` prints of one function, besides what would be sent."""

    live: Version | None
    """The version that is live now; None if there is none."""
    changes: bool
    """Whether the deploy would make a new version."""
    learned: bool
    """Whether the figures rest on starts and calls of the live version, or on none."""
    explanation: Explanation
    """Of a cold start now, for one call."""


class InvocationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What `fs explain` prints."""

    row: InvocationRow
    explanation: Explanation
    """Of its worker's start. Nothing was observed of it by a call that met a worker that was ready: `row.start` hot."""
    ttft_s: float | None
    """From the call's acceptance to the first byte of its answer: what the caller waited, however the start went."""
    decided_s: float
    """When the plan was made, after the call was accepted; negative if before."""
    relayed: tuple[int, ...] = ()
    """Stages that the first one reached through the object store only."""
    prediction: Prediction | None
    """How far predictions for this version were off so far; None if none was ever compared."""
