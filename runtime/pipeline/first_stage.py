"""Lifecycle of a pipeline's first stage: readiness of all stages, then consolidation into a whole worker.

It consolidates when its node announces the rest of the model, or at once when a stage is lost: then its callers wait
for the rest. The model's own code does the consolidation.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from ..contract.errors import FleetError, StartFailed
from ..contract.node.speed import ModeSwitch
from .peer_stages import PeerStages
from .stage_context import StageContext

log = logging.getLogger(__name__)


class OnEnd(Protocol):
    """Handler of a consolidation's end: its error or None, and how running requests were taken over, if any can be."""

    def __call__(self, error: FleetError | None, switch: ModeSwitch | None = None, /) -> None: ...


class FirstStageLifecycle:
    """Waits for the other stages and starts consolidation. `PeerStages` must call `on_broken`."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._begin: Callable[[OnEnd], object] | None = None
        self._peers: PeerStages | None = None
        self._consolidating = False
        self._ended = threading.Event()
        self._failure: FleetError | None = None

    def loaded(self, peers: PeerStages, begin: Callable[[OnEnd], object]) -> None:
        """Marks this stage's own layers as loaded. `begin` starts consolidation and reports its error or None, once."""
        self._peers, self._begin = peers, begin

    def wait_until_ready(self) -> None:
        """Blocks until the pipeline or the whole model can serve. Errors: StartFailed, those of consolidation."""
        peers = self._peers
        assert peers is not None
        if peers.wait_until_loaded(self._left_s()):
            return
        if not peers.broken:
            stages = ", ".join(map(str, peers.missing()))
            raise StartFailed(f"stages {stages} of the pipeline were not ready in time")
        self.consolidate()
        if not self._ended.wait(self._left_s()):
            raise StartFailed(f"the pipeline broke ({peers.broken}), and the rest of the model did not arrive in time")
        if self._failure is not None:
            raise self._failure

    def consolidate(self) -> None:
        """Starts the consolidation, unless one runs or has succeeded. Does nothing before `loaded`."""
        with self._lock:
            if self._consolidating or self._begin is None:
                return
            self._consolidating = True
            self._ended.clear()
            self._failure = None
            self._begin(self._on_end)

    def on_broken(self, why: str) -> None:
        """Handles the loss of a stage, in a thread of the links. Before `loaded`, `wait_until_ready` notices it."""
        log.warning("a stage is lost, the first stage consolidates", extra={"why": why})
        self._context.prioritise_weights()
        self.consolidate()

    def _on_end(self, error: FleetError | None, switch: ModeSwitch | None = None, /) -> None:
        self._failure = error
        if error is None:
            self._context.on_consolidated(switch)
        else:
            log.error("consolidation failed", extra={"error": error.message})
            with self._lock:
                self._consolidating = False
            broken = self._peers.broken if self._peers is not None else ""
            if broken:
                self._context.on_end(f"the pipeline broke ({broken}) and consolidation failed: {error.message}")
        self._ended.set()

    def _left_s(self) -> float:
        return max(0.0, (self._context.deadline_ns - time.monotonic_ns()) / 1e9)
