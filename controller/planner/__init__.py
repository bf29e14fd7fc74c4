"""How a cold start is sized and placed: values and `now` in, a `Plan` out; no I/O, no clock.

`plan(request, cluster, now_s)` is the way in. Measures are learned with `measures`, a node's state follows from its
report and orders with `nodes.node_state`, and what was decided is printed by `explain`. Orders, Redis and the mapping
of plans onto workers are the reconciler's affair. Source: HydraServe sections 4, 5 and 6.1.
"""

from .checkpoint_layout import Shape, shape_of
from .cluster import Cluster
from .node_state import Held, NodeState, OrderSeen, node_state, with_stage
from .plan import Considered, Plan, PlanRequest, StagePlan
from .selection import plan

__all__ = [
    "Cluster",
    "Considered",
    "Held",
    "NodeState",
    "OrderSeen",
    "Plan",
    "PlanRequest",
    "Shape",
    "StagePlan",
    "node_state",
    "plan",
    "shape_of",
    "with_stage",
]
