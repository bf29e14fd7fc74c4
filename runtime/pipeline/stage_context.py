"""What a worker that has a stage knows of its part, and whom it tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..contract.weights.stage import Stage
from .node_messages import NodeMessages


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """What a stage needs to know, and whom to tell. The callbacks come from any thread."""

    stage: Stage
    secret: str
    membership: NodeMessages
    deadline_ns: int
    """Monotonic: until then it must be ready."""
    hurry: Callable[[], object]
    """Somebody waits for the rest of the checkpoint."""
    whole: Callable[[], object]
    """It has grown."""
    end: Callable[[str], object]
    """It cannot go on, and why; or, without a reason, it is needed no longer."""
