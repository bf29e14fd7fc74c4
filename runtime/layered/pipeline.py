"""Runner of a layered model along a pipeline: sends calls to the second stage, receives them from the last.

As many calls are in flight as callers make, so that every stage has work. If a stage is lost, all calls in flight fail
with StageLost and no new ones are accepted; `app` retries them on the whole model.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from ..contract.errors import error_from
from ..pipeline.frames import Activations, Buffer, LayerCallFailed, LinkBroken, Message
from ..pipeline.links import StageLinks
from ..pipeline.peer_stages import PeerStages
from .activations import pack, unpack
from .layer_slice import LayerSlice


class StageLost(Exception):
    """Error of a call in flight when a stage was lost."""


class LayeredPipeline(PeerStages):
    """Runs calls along the pipeline. `StageLinks` must call `on_frame` and `on_lost`."""

    def __init__(self, stages: int, on_broken: Callable[[str], None], *, answer_s: float) -> None:
        """`answer_s`: time limit of one call in the other stages; beyond it a stage counts as lost."""
        super().__init__(stages, on_broken)
        self._answer_s = answer_s
        self._layer_slice: LayerSlice | None = None
        self._numbers = itertools.count()
        self._under_way: dict[int, Future[Any]] = {}
        self._idle = threading.Condition()

    @property
    def in_flight(self) -> int:
        """Number of calls that have begun and not ended."""
        return len(self._under_way)

    def begin(self, links: StageLinks, layer_slice: LayerSlice) -> None:
        """Sets the first stage's layers once they are loaded; other stages may have reported before."""
        self._links, self._layer_slice = links, layer_slice

    def run(self, activations: Any) -> Any:
        """Runs all layers. Errors: StageLost; those of a layer, as a FleetError from another stage."""
        assert self._layer_slice is not None
        number, answer = next(self._numbers), Future[Any]()
        with self._idle:
            if self.broken or self._dismissed:
                raise StageLost(self.broken or "the pipeline was dismissed")
            self._under_way[number] = answer
        try:
            message, payload = pack(number, self._layer_slice.run(activations))
            return self._passed_on(message, payload, answer)
        finally:
            with self._idle:
                del self._under_way[number]
                self._idle.notify_all()

    def _passed_on(self, message: Activations, payload: Buffer, answer: Future[Any]) -> Any:
        try:
            self.send(1, message, payload)
            return answer.result(self._answer_s)
        except LinkBroken as error:
            raise StageLost(str(error)) from error
        except FutureTimeoutError:
            self.break_up(f"no stage answered a call in {self._answer_s:g} s")
            raise StageLost(self.broken) from None

    def dismiss(self) -> None:
        """Dismisses the other stages after the calls in flight; new calls fail with StageLost."""
        with self._idle:
            self._idle.wait_for(lambda: not self._under_way, self._answer_s)
            self._dismissed = True
        super().dismiss()

    def on_frame(self, stage: int, message: Message, payload: bytearray) -> None:
        match message:
            case Activations(number=number) if stage == self.stages - 1:
                self._answer(number, lambda future: future.set_result(unpack(message, payload)))
            case LayerCallFailed(number=number, error=info):
                self._answer(number, lambda future: future.set_exception(error_from(info)))
            case _:
                self.handle(stage, message)

    def _answer(self, number: int, answer: Callable[[Future[Any]], None]) -> None:
        """Sets the result of a call, unless it has ended."""
        with self._idle:
            future = self._under_way.get(number)
            if future is not None and not future.done():
                answer(future)

    def on_lost(self, stage: int, why: str) -> None:
        self.break_up(f"stage {stage} is lost: {why}")

    def break_up(self, why: str) -> None:
        super().break_up(why)
        with self._idle:
            for future in self._under_way.values():
                if not future.done():
                    future.set_exception(StageLost(why))
