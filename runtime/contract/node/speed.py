"""How quick a version's calls are: counted by its worker, gathered by its node, used by the planner."""

from __future__ import annotations

import msgspec


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """How quick calls are on a worker that is ready: running means of the last ones."""

    calls: int
    """That they come from: since the worker was ready, or, in a node's report, since its daemon began."""
    call_s: float
    """How long a call keeps its place."""
    prefill_s: float
    """Until its first token; of a handler of the user's own, until its answer."""
    decode_s: float | None = None
    """Each token after the first; None if there was none."""
    stages: int = 1
    """Of the pipeline that computed the last of them."""
