"""Structs of the management API: the forecast of a deploy, and the placement decision of a cold start."""

from __future__ import annotations

import msgspec

from fleetstart.runtime.contract.billing.ledger import InvocationRow
from fleetstart.runtime.contract.errors import InvalidSpec
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import FunctionName, Version
from fleetstart.runtime.contract.node.orders import SecondEngine
from fleetstart.runtime.contract.weights.stage import LayerLayout

from ..planner.accuracy_report import Explanation
from .functions import Prediction

SIZE_MAX_BYTES = 1 << 50


class Proposal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A version to forecast; its weights need not be in the store."""

    spec: FunctionSpec
    segment_bytes: int = 0
    layout: LayerLayout | None = None
    packages_bytes: int = 0

    def __post_init__(self) -> None:
        sizes = [self.segment_bytes, self.packages_bytes]
        if self.layout is not None:
            sizes += [self.layout.ends_bytes, *self.layout.layer_bytes]
        if not all(0 <= size_bytes <= SIZE_MAX_BYTES for size_bytes in sizes):
            raise InvalidSpec(f"forecast: sizes are 0 to {SIZE_MAX_BYTES} bytes")


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Forecast of a deploy, for `fs deploy --dry-run`."""

    name: FunctionName
    """The full name that the function would have."""
    live: Version | None
    """The version that is live now; None if there is none."""
    changes: bool
    """True if the deploy would make a new version."""
    learned: bool
    """True if the figures are calibrated with starts of the live version."""
    explanation: Explanation
    """Plan of a cold start at present, for one call."""


class InvocationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The placement decision of an invocation's worker, beside what was observed, for `fs explain`."""

    row: InvocationRow
    explanation: Explanation
    """Plan of its worker's start. A hot call (`row.start`) observed nothing of it."""
    ttft_s: float | None
    """Time from the call's acceptance to the first byte of its response."""
    decided_s: float
    """Time of the decision after the call's acceptance; negative if before."""
    relayed: tuple[int, ...] = ()
    """Stages that the first one reached through the object store only."""
    tokens: bool = True
    """True if the function answers in tokens, as language models do."""
    engine: str = ""
    """The engine of a language model."""
    image: str = ""
    """The container image that the version asks for; empty: the platform's own."""
    second_engine: SecondEngine | None = None
    """What had become of it when the call ended, if another engine answered first (`LLMSettings.first`)."""
    prediction: Prediction | None
    """Accuracy of predictions for this version so far; None if none was compared yet."""
