"""Mean call latencies of a version: measured by workers, gathered by nodes, used by the planner; and what it cost a
pipeline's first stage to go on as a whole worker."""

from __future__ import annotations

import math

import msgspec

from ..process.moving_average import fold


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Call latencies on a ready worker, as moving averages."""

    calls: int
    """Number of calls since the worker was ready or, in a node's report, since its daemon started."""
    call_s: float
    """Time that a call keeps its slot."""
    prefill_s: float
    """Time to the first token; of a user's own handler, to its answer."""
    decode_s: float | None = None
    """Time per token after the first; None if there was none."""
    stages: int = 1
    """Number of stages that computed the last call."""
    prompt_tokens: int = 0
    """Tokens of the prompts of these calls, of a language model."""
    cached_tokens: int = 0
    """Those of them whose keys and values were there before the call."""
    device_bytes_per_s: float = 0.0
    """Compute speed of the worker's devices together (`Device.decode_bytes_per_s`), which its node adds; 0: not known,
    or no devices."""

    def is_possible(self, elapsed_s: float) -> bool:
        """True if a worker that was ordered that long ago can have measured this: user code may have written it."""
        times = (self.call_s, self.prefill_s, self.decode_s or 0.0)
        return all(0.0 <= time_s <= elapsed_s for time_s in times)

    def folded_into(self, mean: Speed | None) -> Speed:
        """The running mean with this sample in it. Starts over when the number of stages has changed."""
        if mean is None:
            return self
        if mean.stages != self.stages:
            return msgspec.structs.replace(self, calls=mean.calls + 1, **self._tokens_after(mean))
        decode_s = mean.decode_s if self.decode_s is None else self.decode_s
        if mean.decode_s is not None and self.decode_s is not None:
            decode_s = fold(mean.decode_s, self.decode_s, mean.calls)
        return Speed(
            calls=mean.calls + 1,
            call_s=fold(mean.call_s, self.call_s, mean.calls),
            prefill_s=fold(mean.prefill_s, self.prefill_s, mean.calls),
            decode_s=decode_s,
            stages=self.stages,
            **self._tokens_after(mean),
        )

    def _tokens_after(self, mean: Speed) -> dict[str, int]:
        return {
            "prompt_tokens": mean.prompt_tokens + self.prompt_tokens,
            "cached_tokens": mean.cached_tokens + self.cached_tokens,
        }


class ModeSwitch(msgspec.Struct, frozen=True, kw_only=True):
    """Keys and values of the requests that ran when a pipeline's first stage became a whole worker: how they came."""

    copied_tokens: int = 0
    """Tokens whose keys and values were copied from the other stages."""
    recomputed_tokens: int = 0
    """Tokens of which they were computed again."""
    copy_s: float = 0.0
    """Predicted time of copying all."""
    recompute_s: float = 0.0
    """Predicted time of computing all again."""
    took_s: float = 0.0
    """Time that it took. The requests went on meanwhile, but for the last tokens."""

    @property
    def possible(self) -> bool:
        """True if a worker can have measured this: user code may have written it."""
        figures = (self.copied_tokens, self.recomputed_tokens, self.copy_s, self.recompute_s, self.took_s)
        return all(figure >= 0 and math.isfinite(figure) for figure in figures)

    def with_round(
        self, *, copied: int, recomputed: int, copy_s: float, recompute_s: float, took_s: float
    ) -> ModeSwitch:
        """The sums with one more round, of the tokens that had come since the one before."""
        return ModeSwitch(
            copied_tokens=self.copied_tokens + copied,
            recomputed_tokens=self.recomputed_tokens + recomputed,
            copy_s=self.copy_s + copy_s,
            recompute_s=self.recompute_s + (recompute_s if math.isfinite(recompute_s) else 0.0),
            took_s=self.took_s + took_s,
        )
