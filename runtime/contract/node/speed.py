"""How quick a version's calls are: counted by its worker, gathered by its node, used by the planner."""

from __future__ import annotations

import msgspec

SMOOTHING = 0.2
"""Weight of a new call in the running means once there are some: a change shows within ten calls."""


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

    def folded_into(self, mean: Speed | None) -> Speed:
        """The running mean with this sample in it. Starts over when the number of stages has changed."""
        if mean is None:
            return self
        if mean.stages != self.stages:
            return msgspec.structs.replace(self, calls=mean.calls + 1)
        share = max(SMOOTHING, 1 / (mean.calls + 1))

        def between(old: float, new: float) -> float:
            return old + share * (new - old)

        decode_s = mean.decode_s if self.decode_s is None else self.decode_s
        if mean.decode_s is not None and self.decode_s is not None:
            decode_s = between(mean.decode_s, self.decode_s)
        return Speed(
            calls=mean.calls + 1,
            call_s=between(mean.call_s, self.call_s),
            prefill_s=between(mean.prefill_s, self.prefill_s),
            decode_s=decode_s,
            stages=self.stages,
        )
