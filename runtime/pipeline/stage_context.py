"""Context of a pipeline stage: its position, its secret, its callbacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..contract.identity import Identity
from ..contract.node.speed import ModeSwitch
from ..contract.weights.stage import Stage
from .node_messages import NodeMessages


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """Inputs and callbacks of one stage. The stage calls the callbacks from any thread."""

    stage: Stage
    secret: str
    node_messages: NodeMessages
    deadline_ns: int
    """Monotonic time by which the stage must be ready."""
    prioritise_weights: Callable[[], object]
    """Asks the node to fetch the rest of the checkpoint now."""
    on_consolidated: Callable[[ModeSwitch | None], object]
    """Reports that the worker has the whole model, and how the first stage took running requests over."""
    on_end: Callable[[str], object]
    """Reports the end of the stage; the reason is empty if it was dismissed."""
    identity: Identity | None = None
    """The pipeline's own, for links that leave this machine; None on a node that only this machine reaches."""
