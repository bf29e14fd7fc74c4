"""The forecast of a deploy (`fs deploy --dry-run`): nodes, cold start time and cost.

The planner's result for a cold start now, with the estimates of the function's live version, if it has one.
"""

from __future__ import annotations

from fleetstart.runtime.contract.ids import Version

from ..planner.accuracy_report import ObservedStart, explain
from ..schemas.planning import Forecast, Proposal
from ..state.records import VersionKey, VersionRecord
from ..state.view import View
from .live_cluster import LiveCluster
from .start_orders import plan_start, request_of


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
        packages_bytes=proposal.packages_bytes,
    )
    plan = plan_start(request_of(view, key, record, 1), LiveCluster(view).refreshed(now_ns, now_unix_ns), now_ns / 1e9)
    return Forecast(
        name=spec.name,
        live=live.version if live is not None else None,
        changes=live is None or live.spec != spec,
        learned=key in view.version_measures,
        explanation=explain(plan, ObservedStart()),
    )
