"""Multicast plans: the pulls of each receiver, predicted times, and the candidates that were considered.

Stored with what caused them, so that `fs explain` can print them; `pulls` travel in orders as they are.
"""

from __future__ import annotations

import msgspec

from fleetstart.runtime.contract.ids import NodeId
from fleetstart.runtime.contract.node.peers import Pull

from .request import Ranges


class ReceiverPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One receiver's part of a plan."""

    node: NodeId
    peers: tuple[NodeId, ...]
    """The nodes that it reads from: `Pull.peer` is the place here."""
    pulls: tuple[Pull, ...]
    """In order; a holder that does not have the block yet answers once it has it."""
    arrivals_s: tuple[float, ...]
    """Predicted, after the start, for each pull."""

    @property
    def first_s(self) -> float:
        """When its first block is there; 0 if it lacked none."""
        return min(self.arrivals_s, default=0.0)

    @property
    def last_s(self) -> float:
        """When it is whole."""
        return max(self.arrivals_s, default=0.0)


class PipelineStage(msgspec.Struct, frozen=True):
    """A node's part of an execution pipeline."""

    node: NodeId
    first: int
    end: int
    """The chunk after its last; as `first` for a node that serves only once it is whole."""


class PipelinePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Receivers that can serve together before any of them is whole (λScale, Algorithm 2)."""

    stages: tuple[PipelineStage, ...]
    ready_s: float
    """Predicted: when each has the chunks of its stage."""


class MulticastCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """A way to send that was considered."""

    name: str
    seconds: float = 0.0
    """Predicted, until the last receiver is whole."""
    mean_s: float = 0.0
    """Until a receiver is whole, on average."""
    steps: int = 0
    why_not: str = ""
    """Reason for not taking it; empty for the one that was taken."""


class MulticastPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The decision about one multicast."""

    name: str
    """Of the candidate that was taken; empty if nothing is to be sent."""
    receivers: tuple[ReceiverPlan, ...]
    pipelines: tuple[PipelinePlan, ...]
    blocks: tuple[tuple[int, int], ...]
    """(first, end) of each block's chunks."""
    seconds: float
    mean_s: float
    reason: str
    considered: tuple[MulticastCandidate, ...]
    pruned: tuple[NodeId, ...] = ()
    """Sources that are not used, because serving uses the outgoing direction of their links."""
    unreachable: Ranges = ()
    """Chunks that no node holds, where there is no store to read them from; nobody receives them."""
