"""The multicast planner: who reads which chunks from whom, so that many nodes soon have a checkpoint. Pure values in,
a `MulticastPlan` out; the nodes execute it by pulls.

`plan_multicast(request)` is the entry point: it predicts the candidates (binomial pipeline, chains, rarest block first,
each from the store) and takes the quickest. A plan that a node's death, lag or arrival spoils is made anew from what
each node has by then (`changed_request`). Sources: λScale sections 4.2 and 4.3, BlitzScale section 5.1.
"""

from .block_count import BlockCost, elbow, fit_cost, multicast_s
from .plan import (
    MulticastCandidate,
    MulticastPlan,
    PipelinePlan,
    PipelineStage,
    ReceiverPlan,
)
from .request import MulticastNode, MulticastRequest, changed_request
from .selection import plan_multicast

__all__ = [
    "BlockCost",
    "MulticastCandidate",
    "MulticastNode",
    "MulticastPlan",
    "MulticastRequest",
    "PipelinePlan",
    "PipelineStage",
    "ReceiverPlan",
    "changed_request",
    "elbow",
    "fit_cost",
    "multicast_s",
    "plan_multicast",
]
