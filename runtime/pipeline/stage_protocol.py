"""What every stage behind the first does, whatever it computes: says that it is ready, hears that it is over."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

from .frames import Buffer, LinkBroken, Message, StageBroken, StageLoaded
from .links import StageLinks

log = logging.getLogger(__name__)


class StageProtocol(ABC):
    """`links` must call `on_frame` and `on_lost` of this object. `on_end` is called once, when the pipeline needs this
    stage no longer (no reason given) or cannot go on with it."""

    def __init__(self, on_end: Callable[[str], object]) -> None:
        self._on_end = on_end
        self._links: StageLinks | None = None
        self._early = ""
        """What was lost before it was at work."""
        self._ended = threading.Event()

    @abstractmethod
    def on_frame(self, index: int, message: Message, payload: bytearray) -> None:
        """In a thread of the links. Errors: ValueError for a frame that cannot be; its link is given up then."""

    @abstractmethod
    def close(self) -> None:
        """Computes nothing more. May be called again."""

    def begin(self, links: StageLinks) -> None:
        """Its layers and its links are there: it tells the first stage."""
        self._links = links
        self.send(0, StageBroken(self._early) if self._early else StageLoaded())

    def on_lost(self, index: int, why: str) -> None:
        """Without the first there is no pipeline. Any other loss is the first's to deal with, if it knows."""
        if index == 0:
            self.end(f"the first stage is lost: {why}")
        else:
            self._early = f"stage {index} is lost: {why}"
            self.send(0, StageBroken(self._early))

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def end(self, why: str) -> None:
        """Its pipeline needs it no longer, or, for that reason, cannot have it."""
        if not self._ended.is_set():
            self._ended.set()
            self.close()
            self._on_end(why)

    def send(self, index: int, message: Message, payload: Buffer = b"") -> None:
        """What cannot be sent is logged: the links tell of the loss themselves."""
        if self._links is None:
            return  # not at work yet: its first word to the first stage will be this
        try:
            self._links.send(index, message, payload)
        except LinkBroken as error:
            log.warning("a frame could not be sent", extra={"stage": index, "error": str(error)})
