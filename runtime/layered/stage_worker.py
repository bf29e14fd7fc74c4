"""Compute loop of a later layered stage: receives activations, runs its layers, sends them to the next stage.

One thread computes calls in order. An exception of a layer fails only its call.
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
from .layer_slice import LayerSlice

log = logging.getLogger(__name__)


class LayeredStageWorker(StageProtocol):
    """Later stage of a layered model; computes after `run`."""

    def __init__(self, on_end: Callable[[str], object], *, bundle_dir: str) -> None:
        super().__init__(on_end)
        self._bundle_dir = bundle_dir
        self._work: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()

    def run(self, links: StageLinks, layer_slice: LayerSlice) -> None:
        """Starts to compute, when layers and links are ready, and reports that to the first stage."""
        threading.Thread(target=self._compute, args=(links.stage, layer_slice), name="stage", daemon=True).start()
        self.begin(links)

    def on_frame(self, index: int, message: Message, payload: bytearray) -> None:
        """Handles a frame. Errors: ValueError for invalid activations; their link is closed."""
        match message:
            case Activations():
                self._work.put((message.number, unpack(message, payload)))
            case Dismiss():
                self.end("")
            case _:
                log.warning("a frame that no stage sends to this one", extra={"frame": type(message).__name__})

    def close(self) -> None:
        self._work.put(None)

    def _compute(self, stage: Stage, layer_slice: LayerSlice) -> None:
        following = (stage.index + 1) % stage.count
        while (work := self._work.get()) is not None:
            number, activations = work
            try:
                message, payload = pack(number, layer_slice.run(activations))
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
