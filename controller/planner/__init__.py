"""The cold start planner: sizes and places a start. Values and `now` in, a `Plan` out; no I/O, no clock.

`make_plan(request, cluster, now_s)` is the entry point. `estimates` learns measures from observations, `node_state`
derives a node's state from its report and orders, `accuracy_report` compares a plan with its outcome. Orders, Redis and
the mapping of plans onto workers belong to the scheduler. Source: HydraServe sections 4, 5 and 6.1.

Its names are imported at their first use: the command line reads records, which have `estimates`, and plans nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint_layout import CheckpointLayout
    from .cluster import Cluster
    from .node_state import HeldLayers, NodeState, OrderState, with_stage
    from .plan import CandidateReport, FileTree, Plan, PlanRequest, StagePlan
    from .selection import make_plan

__all__ = [
    "CandidateReport",
    "CheckpointLayout",
    "Cluster",
    "FileTree",
    "HeldLayers",
    "NodeState",
    "OrderState",
    "Plan",
    "PlanRequest",
    "StagePlan",
    "make_plan",
    "with_stage",
]

_LATE = {
    "CandidateReport": "plan",
    "CheckpointLayout": "checkpoint_layout",
    "Cluster": "cluster",
    "FileTree": "plan",
    "HeldLayers": "node_state",
    "NodeState": "node_state",
    "OrderState": "node_state",
    "Plan": "plan",
    "PlanRequest": "plan",
    "StagePlan": "plan",
    "make_plan": "selection",
    "with_stage": "node_state",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_LATE[name]}"), name)
    return found
