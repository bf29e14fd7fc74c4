"""A stage that is not the first: activations in from the stage before, through its layers, and on to the next.

Calls are computed in the order in which they come, by one thread. What a layer raises fails its call, and nothing else.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from ..contract.errors import ErrorInfo, FleetError, HandlerFailed
from ..contract.weights.stage import Stage
from ..pipeline.frames import Activations, Dismiss, LayerCallFailed, Message
from ..pipeline.links import StageLinks
from ..pipeline.stage_protocol import StageProtocol
from ..worker_io import user_errors
from .activations import pack, unpack
from .layer_range import LayerRange

log = logging.getLogger(__name__)


class LayeredStageWorker(StageProtocol):
    """Computes once `run` was called."""

    def __init__(self, on_end: Callable[[str], object], *, bundle_dir: str) -> None:
        super().__init__(on_end)
        self._bundle_dir = bundle_dir
        self._work: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()

    def run(self, links: StageLinks, row: LayerRange) -> None:
        """Its layers and its links are there: it tells the first stage, and works from now on."""
        threading.Thread(target=self._compute, args=(links.stage, row), name="stage", daemon=True).start()
        self.begin(links)

    def on_frame(self, index: int, message: Message, payload: bytearray) -> None:
        """Errors: ValueError for activations that cannot be; their link is given up then."""
        match message:
            case Activations():
                self._work.put((message.number, unpack(message, payload)))
            case Dismiss():
                self.end("")
            case _:
                log.warning("a frame that no stage sends to this one", extra={"frame": type(message).__name__})

    def close(self) -> None:
        self._work.put(None)

    def _compute(self, stage: Stage, row: LayerRange) -> None:
        following = (stage.index + 1) % stage.count
        while (work := self._work.get()) is not None:
            number, activations = work
            try:
                message, payload = pack(number, row.run(activations))
            except Exception as error:
                self.send(0, LayerCallFailed(number, self._explained(error)))
            else:
                self.send(following, message, payload)

    def _explained(self, error: Exception) -> ErrorInfo:
        user_errors.log(error, "a layer failed:")
        if isinstance(error, FleetError):
            return error.info()
        text = user_errors.describe(error, self._bundle_dir)
        return HandlerFailed(text, hint="the traceback is in the function's log").info()
