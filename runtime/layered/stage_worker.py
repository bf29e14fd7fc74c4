"""A stage that is not the first: activations in from the stage before, through its layers, and on to the next.

Calls are computed in the order in which they come, by one thread. What a layer raises fails its call, and nothing else.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from fleetstart.runtime import blame
from fleetstart.runtime.contract.errors import ErrorInfo, FleetError, HandlerFailed
from fleetstart.runtime.layered.arrays import pack, unpack
from fleetstart.runtime.layered.row import Row
from fleetstart.runtime.pipeline.frames import (
    Activations,
    Broken,
    Buffer,
    CallFailed,
    Farewell,
    LinkBroken,
    Loaded,
    Message,
)
from fleetstart.runtime.pipeline.links import Links

log = logging.getLogger(__name__)


class StageWorker:
    """`links` must call `on_frame` and `on_lost` of this object. `on_end` is called once, when the pipeline needs this
    stage no longer (no reason given) or cannot go on with it."""

    def __init__(self, on_end: Callable[[str], object], *, bundle_dir: str) -> None:
        self._on_end = on_end
        self._bundle_dir = bundle_dir
        self._links: Links | None = None
        self._row: Row | None = None
        self._early = ""
        """What was lost before it was at work."""
        self._work: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._ended = threading.Event()

    def run(self, links: Links, row: Row) -> None:
        """Its layers and its links are there: it tells the first stage, and works from now on."""
        self._links, self._row = links, row
        threading.Thread(target=self._compute, name="stage", daemon=True).start()
        self._send(0, Broken(self._early) if self._early else Loaded())

    def on_frame(self, _: int, message: Message, payload: bytearray) -> None:
        """Errors: ValueError for activations that cannot be; their link is given up then."""
        match message:
            case Activations():
                self._work.put((message.number, unpack(message, payload)))
            case Farewell():
                self._end("")
            case _:
                log.warning("a frame that no stage sends to this one", extra={"frame": type(message).__name__})

    def on_lost(self, index: int, why: str) -> None:
        """Without the first there is no pipeline. Any other loss is the first's to deal with, if it knows."""
        if index == 0:
            self._end(f"the first stage is lost: {why}")
        else:
            self._early = f"stage {index} is lost: {why}"
            self._send(0, Broken(self._early))

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def close(self) -> None:
        self._work.put(None)

    def _end(self, why: str) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self.close()
            self._on_end(why)

    def _compute(self) -> None:
        assert self._links is not None
        assert self._row is not None
        stage = self._links.stage
        following = (stage.index + 1) % stage.count
        while (work := self._work.get()) is not None:
            number, activations = work
            try:
                message, payload = pack(number, self._row.run(activations))
            except Exception as error:
                self._send(0, CallFailed(number, self._explained(error)))
            else:
                self._send(following, message, payload)

    def _explained(self, error: Exception) -> ErrorInfo:
        blame.log(error, "a layer failed:")
        if isinstance(error, FleetError):
            return error.info()
        text = blame.describe(error, self._bundle_dir)
        return HandlerFailed(text, hint="the traceback is in the function's log").info()

    def _send(self, index: int, message: Message, payload: Buffer = b"") -> None:
        if self._links is None:
            return  # not at work yet: its first word to the first stage will be this
        try:
            self._links.send(index, message, payload)
        except LinkBroken as error:
            log.warning("a frame could not be sent", extra={"stage": index, "error": str(error)})
