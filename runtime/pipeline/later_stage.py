"""Lifecycle of a later pipeline stage: it computes for its pipeline, and may consolidate into a whole worker.

It serves callers once it has consolidated (scale up, HydraServe section 6.1). Subclasses load the whole model and take
over requests of the pipeline.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar

from ..contract.errors import StartFailed, Unavailable
from ..contract.node.speed import Speed
from ..worker_io.asgi import Receive, Scope, Send, respond_error
from .links import StageLinks
from .stage_context import StageContext
from .stage_protocol import StageProtocol

log = logging.getLogger(__name__)


class WholeModelApp(Protocol):
    """An ASGI app over a whole model."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    def speed(self) -> Speed | None: ...


App = TypeVar("App", bound=WholeModelApp)


class LaterStageLifecycle(ABC, Generic[App]):
    """One later stage. `NodeMessages` calls `connect` and `consolidate`."""

    def __init__(self, context: StageContext, protocol: StageProtocol) -> None:
        """`protocol` must call `on_end` of this object."""
        self._context = context
        self._protocol = protocol
        self._lock = threading.Lock()
        self._consolidating = False
        self.whole_app: App | None = None
        self.links = StageLinks(
            context.stage,
            context.secret,
            context.node_messages.listener,
            protocol.on_frame,
            protocol.on_lost,
            context.identity,
        )
        context.node_messages.adopt(self)

    @abstractmethod
    def _run(self) -> None:
        """Starts to compute; called when all links are open."""

    @abstractmethod
    def _load(self) -> App:
        """Loads the whole model while the stage computes. Errors: any."""

    def _on_consolidated(self, app: App) -> None:
        """Runs after the node was told, in the consolidation's thread."""

    def connect(self, index: int, link: socket.socket) -> None:
        self.links.connect(index, link)

    def wait_until_ready(self) -> None:
        """Blocks until all links are open, then starts to compute. Errors: StartFailed at the deadline."""
        left_s = (self._context.deadline_ns - time.monotonic_ns()) / 1e9
        if not self.links.wait(max(0.0, left_s)):
            raise StartFailed(
                f"stage {self._context.stage.index}: no links to the other stages of its pipeline in time"
            )
        self._run()

    def consolidate(self) -> None:
        """Loads the whole model in a thread, unless that runs or has succeeded."""
        with self._lock:
            if self._consolidating:
                return
            self._consolidating = True
        threading.Thread(target=self._consolidate, name="stage-growth", daemon=True).start()

    def speed(self) -> Speed | None:
        """Speed of the whole model's calls; None before consolidation."""
        return self.whole_app.speed() if self.whole_app is not None else None

    def close(self) -> None:
        self._protocol.close()
        self.links.close()

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.whole_app is not None:
            await self.whole_app(scope, receive, send)
        else:
            error = Unavailable("this worker runs a pipeline stage and accepts no calls", retry_after_s=0)
            await respond_error(send, error, "")

    def on_end(self, why: str) -> None:
        """Handles the end of the pipeline: ends the stage, unless it is consolidating."""
        if self._consolidating:
            log.info("the pipeline ended, consolidation continues", extra={"why": why})
        else:
            self._context.on_end(why)

    def _consolidate(self) -> None:
        try:
            app = self._load()
        except Exception as error:
            log.exception("consolidation failed")
            with self._lock:
                self._consolidating = False
            if self._protocol.ended:
                self._context.on_end(f"consolidation failed: {error}")
            return
        self.whole_app = app
        self._context.on_consolidated(None)
        self._on_consolidated(app)
