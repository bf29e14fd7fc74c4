"""Latency statistics of requests: time to first token and time per output token, for the planner's predictions.

The engine's thread records each step's deltas; any thread may read `mean`. A request that started in a pipeline and
ended on a whole worker is not counted. The time to the first token of a prompt that was partly cached is not either,
unless it is the first: predictions are of starts, and a new worker has nothing cached.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...contract.node.speed import Speed
from .generation import TokenDelta


@dataclass(slots=True)
class _OpenRequest:
    added_ns: int
    stages: int
    prompt_tokens: int
    cached_tokens: int = 0
    first_ns: int = 0
    tokens: int = 0


class LatencyStats:
    """Mean latencies of completed requests."""

    def __init__(self) -> None:
        self._open: dict[int, _OpenRequest] = {}
        self.mean: Speed | None = None
        """Mean over the measured requests; `call_s` is the time in the engine."""

    def add(self, id: int, now_ns: int, stages: int, prompt_tokens: int = 0) -> None:
        """Starts to measure a request."""
        self._open[id] = _OpenRequest(now_ns, stages, prompt_tokens)

    def discard(self, id: int) -> None:
        """Drops a cancelled request."""
        self._open.pop(id, None)

    def record(self, deltas: Iterable[TokenDelta], now_ns: int, stages: int) -> None:
        """Records the deltas of a step that ran on that many stages."""
        for delta in deltas:
            request = self._open.get(delta.id)
            if request is None:
                continue
            if delta.tokens:
                request.first_ns = request.first_ns or now_ns
                request.tokens += len(delta.tokens)
                request.cached_tokens += delta.cached_tokens
            if delta.last:
                del self._open[delta.id]
                if delta.error is None and request.tokens and request.stages == stages:
                    self._fold(request, now_ns)

    def _fold(self, request: _OpenRequest, now_ns: int) -> None:
        decode_s = (now_ns - request.first_ns) / 1e9 / (request.tokens - 1) if request.tokens > 1 else None
        prefill_s = (request.first_ns - request.added_ns) / 1e9
        if request.cached_tokens and self.mean is not None:
            prefill_s = self.mean.prefill_s
        one = Speed(
            calls=1,
            call_s=(now_ns - request.added_ns) / 1e9,
            prefill_s=prefill_s,
            decode_s=decode_s,
            stages=request.stages,
            prompt_tokens=request.prompt_tokens,
            cached_tokens=request.cached_tokens,
        )
        self.mean = one.folded_into(self.mean)
