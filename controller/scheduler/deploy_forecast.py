"""What a deploy would come to before anything is sent: where it can run, how quickly it would wake, what a call costs.

The planner's own answer for a cold start now, with what was learned of the function's live version, if it has one.
"""

from __future__ import annotations

import msgspec

from fleetstart.runtime.contract.errors import InvalidSpec
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import Version
from fleetstart.runtime.contract.weights.stage import Layout

from ..planner.report import Explanation, Outcome, explained
from ..state.records import VersionKey, VersionRecord
from ..state.view import View
from .planning import cluster_of, planned, request_of

SIZE_MAX_BYTES = 1 << 50


class Proposal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A version that is not there yet; its weights need not be in the store."""

    spec: FunctionSpec
    segment_bytes: int = 0
    layout: Layout | None = None

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


def forecast(view: View, proposal: Proposal, *, now_ns: int, now_unix_ns: int) -> Forecast:
    spec = proposal.spec
    live = view.live(spec.name)
    key = VersionKey(spec.name, live.version if live is not None else Version(1))
    record = VersionRecord(
        version=key.version,
        digest="",
        spec=spec,
        segment_bytes=proposal.segment_bytes,
        created_unix_ms=now_unix_ns // 1_000_000,
        layout=proposal.layout,
    )
    plan = planned(request_of(view, key, record, 1), cluster_of(view, {}, now_ns, now_unix_ns), now_ns / 1e9)
    return Forecast(
        live=live.version if live is not None else None,
        changes=live is None or live.spec != spec,
        learned=key in view.version_measures,
        explanation=explained(plan, Outcome()),
    )
