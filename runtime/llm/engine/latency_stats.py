"""How long requests take until their first token, and for each one after it: what the planner predicts from.

Fed by the engine's thread with what each step brought and when; any thread may read `mean`. A request that was
computed by a pipeline first and by a whole worker in the end says nothing clear of either, and is not counted.
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
    first_ns: int = 0
    tokens: int = 0


class LatencyStats:
    def __init__(self) -> None:
        self._open: dict[int, _OpenRequest] = {}
        self.mean: Speed | None = None
        """Of all that were measured; `call_s` is the time in the engine."""

    def begins(self, id: int, now_ns: int, stages: int) -> None:
        self._open[id] = _OpenRequest(now_ns, stages)

    def forgets(self, id: int) -> None:
        """It was cancelled."""
        self._open.pop(id, None)

    def sees(self, deltas: Iterable[TokenDelta], now_ns: int, stages: int) -> None:
        """What a step of a runner of so many stages brought."""
        for delta in deltas:
            request = self._open.get(delta.id)
            if request is None:
                continue
            if delta.tokens:
                request.first_ns = request.first_ns or now_ns
                request.tokens += len(delta.tokens)
            if delta.last:
                del self._open[delta.id]
                if delta.error is None and request.tokens and request.stages == stages:
                    self._fold(request, now_ns)

    def _fold(self, request: _OpenRequest, now_ns: int) -> None:
        decode_s = (now_ns - request.first_ns) / 1e9 / (request.tokens - 1) if request.tokens > 1 else None
        one = Speed(
            calls=1,
            call_s=(now_ns - request.added_ns) / 1e9,
            prefill_s=(request.first_ns - request.added_ns) / 1e9,
            decode_s=decode_s,
            stages=request.stages,
        )
        self.mean = one.folded_into(self.mean)
