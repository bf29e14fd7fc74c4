"""The cold start planner: sizes and places a start. Values and `now` in, a `Plan` out; no I/O, no clock.

`make_plan(request, cluster, now_s)` is the entry point. `estimates` learns measures from observations, `node_state`
derives a node's state from its report and orders, `accuracy_report` compares a plan with its outcome. Orders, Redis and
the mapping of plans onto workers belong to the scheduler. Source: HydraServe sections 4, 5 and 6.1.
"""

from .checkpoint_layout import CheckpointLayout, checkpoint_layout
from .cluster import Cluster
from .node_state import HeldLayers, NodeState, OrderState, node_state, with_stage
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
    "checkpoint_layout",
    "make_plan",
    "node_state",
    "with_stage",
]
