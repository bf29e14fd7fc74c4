"""Protocol between a later stage and the first one: "loaded", "peer lost", and the dismissal that ends the stage."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

from .frames import Buffer, LinkBroken, Message, StageBroken, StageLoaded
from .links import StageLinks

log = logging.getLogger(__name__)


class StageProtocol(ABC):
    """Base of a later stage's message handling. `StageLinks` must call `on_frame` and `on_lost`. `on_end` is called
    once: without a reason when the stage is dismissed, with one when the pipeline cannot continue."""

    def __init__(self, on_end: Callable[[str], object]) -> None:
        self._on_end = on_end
        self._links: StageLinks | None = None
        self._early = ""
        """Loss that happened before `begin`."""
        self._ended = threading.Event()

    @abstractmethod
    def on_frame(self, index: int, message: Message, payload: bytearray) -> None:
        """Handles a frame, in a thread of the links. Errors: ValueError for an invalid frame; its link is closed."""

    @abstractmethod
    def close(self) -> None:
        """Stops computing. Idempotent."""

    def begin(self, links: StageLinks) -> None:
        """Reports to the first stage that layers and links are ready."""
        self._links = links
        self.send(0, StageBroken(self._early) if self._early else StageLoaded())

    def on_lost(self, index: int, why: str) -> None:
        """Handles a lost link: to the first stage, it ends the pipeline; to another, it is reported to the first."""
        if index == 0:
            self.end(f"the first stage is lost: {why}")
        else:
            self._early = f"stage {index} is lost: {why}"
            self.send(0, StageBroken(self._early))

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def end(self, why: str) -> None:
        """Ends the stage, once; `why` is empty if it was dismissed."""
        if not self._ended.is_set():
            self._ended.set()
            self.close()
            self._on_end(why)

    def send(self, index: int, message: Message, payload: Buffer = b"") -> None:
        """Sends a frame. A failure is only logged: the links report the loss themselves."""
        if self._links is None:
            return  # before `begin`, which reports it
        try:
            self._links.send(index, message, payload)
        except LinkBroken as error:
            log.warning("a frame could not be sent", extra={"stage": index, "error": str(error)})
