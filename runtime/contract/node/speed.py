"""How quick a version's calls are: counted by its worker, gathered by its node, used by the planner."""

from __future__ import annotations

import msgspec

from ..process.moving_average import fold


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
        decode_s = mean.decode_s if self.decode_s is None else self.decode_s
        if mean.decode_s is not None and self.decode_s is not None:
            decode_s = fold(mean.decode_s, self.decode_s, mean.calls)
        return Speed(
            calls=mean.calls + 1,
            call_s=fold(mean.call_s, self.call_s, mean.calls),
            prefill_s=fold(mean.prefill_s, self.prefill_s, mean.calls),
            decode_s=decode_s,
            stages=self.stages,
        )
