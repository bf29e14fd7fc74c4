"""The life of a first stage, whatever its model is: ready when all stages are, and whole when it must be or may be.

It grows once its node says that the rest of the model is there, or at once when a stage is lost: then its callers
wait for the rest. How it grows is its model's affair.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ..contract.errors import FleetError, StartFailed
from .peer_stages import PeerStages
from .stage_context import StageContext

log = logging.getLogger(__name__)


class FirstStageLifecycle:
    """`on_broken` is what its crew must call."""

    def __init__(self, of: StageContext) -> None:
        self._of = of
        self._lock = threading.Lock()
        self._begin: Callable[[Callable[[FleetError | None], None]], object] | None = None
        self._crew: PeerStages | None = None
        self._growing = False
        self._ended = threading.Event()
        self._failure: FleetError | None = None

    def loaded(self, crew: PeerStages, begin: Callable[[Callable[[FleetError | None], None]], object]) -> None:
        """Its own layers are there. `begin` begins to grow, and its argument is called once with how that ended."""
        self._crew, self._begin = crew, begin

    def wait_until_ready(self) -> None:
        """Errors: StartFailed, and what kept it from growing."""
        crew = self._crew
        assert crew is not None
        if crew.wait_until_loaded(self._left_s()):
            return
        if not crew.broken:
            stages = ", ".join(map(str, crew.missing()))
            raise StartFailed(f"stages {stages} of its pipeline did not get ready in time")
        self.grow()
        if not self._ended.wait(self._left_s()):
            raise StartFailed(f"its pipeline broke ({crew.broken}), and the rest of the model did not come in time")
        if self._failure is not None:
            raise self._failure

    def grow(self) -> None:
        """Once; again only after it failed. Before its own layers are there, there is nothing that could grow."""
        with self._lock:
            if self._growing or self._begin is None:
                return
            self._growing = True
            self._ended.clear()
            self._failure = None
            self._begin(self._on_end)

    def on_broken(self, why: str) -> None:
        """In a thread of the links; perhaps before its own layers are there, and then `wait_until_ready` sees it."""
        log.warning("a stage is lost, the first goes on alone", extra={"why": why})
        self._of.hurry()
        self.grow()

    def _on_end(self, error: FleetError | None) -> None:
        self._failure = error
        if error is None:
            self._of.whole()
        else:
            log.error("the stage could not grow", extra={"error": error.message})
            with self._lock:
                self._growing = False
            broken = self._crew.broken if self._crew is not None else ""
            if broken:
                self._of.end(f"its pipeline broke ({broken}) and it cannot go on alone: {error.message}")
        self._ended.set()

    def _left_s(self) -> float:
        return max(0.0, (self._of.deadline_ns - time.monotonic_ns()) / 1e9)
