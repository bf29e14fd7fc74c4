"""Calls along the stages of a model in layers: out to the second stage, and back from the last.

As many are under way as callers ask for, so that every stage has work. If a stage is lost, all that are under way are
told so, and nothing is taken any more: whoever called begins anew on the whole model (`app`).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from typing import Any

from ..contract.errors import error_from
from ..pipeline.frames import Activations, Buffer, LayerCallFailed, LinkBroken, Message
from ..pipeline.links import StageLinks
from ..pipeline.peer_stages import PeerStages
from .activations import pack, unpack
from .layer_range import LayerRange


class StageLost(Exception):
    """Part of the pipeline is gone, and with it the calls that were under way."""


class LayeredPipeline(PeerStages):
    """`links` must call `on_frame` and `on_lost` of this object."""

    def __init__(self, stages: int, on_broken: Callable[[str], None], *, answer_s: float) -> None:
        """A stage that has not answered a call in `answer_s` hangs, and is lost."""
        super().__init__(stages, on_broken)
        self._answer_s = answer_s
        self._row: LayerRange | None = None
        self._numbers = itertools.count()
        self._under_way: dict[int, Future[Any]] = {}
        self._idle = threading.Condition()

    def begin(self, links: StageLinks, row: LayerRange) -> None:
        """The first stage's own layers are there. The others may have told of theirs before."""
        self._links, self._row = links, row

    def run(self, activations: Any) -> Any:
        """What all layers make of them. Errors: StageLost; what a layer raised, as a FleetError of another stage."""
        assert self._row is not None
        number, answer = next(self._numbers), Future[Any]()
        with self._idle:
            if self.broken or self._dismissed:
                raise StageLost(self.broken or "the pipeline was let go")
            self._under_way[number] = answer
        try:
            message, payload = pack(number, self._row.run(activations))
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
        except Late:
            self.break_up(f"no stage answered a call in {self._answer_s:g} s")
            raise StageLost(self.broken) from None

    def dismiss(self) -> None:
        """Lets the other stages go once the calls under way have ended; those that come meanwhile are told so."""
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
        """Once; a call that nobody waits for any more has no use for it."""
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
