"""The life of a stage that is not the first, whatever its model is: it computes for its pipeline, and may grow.

It serves callers once it has grown: then it is a whole worker (scale up, HydraServe section 6.1). How its model is
loaded whole, and what of its pipeline's requests it takes over, is its model's affair.
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
    """The app of a worker with the whole model."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    def speed(self) -> Speed | None: ...


App = TypeVar("App", bound=WholeModelApp)


class LaterStageLifecycle(ABC, Generic[App]):
    """Told of connections and of growth by the shell."""

    def __init__(self, of: StageContext, helper: StageProtocol) -> None:
        """`helper` must call `on_end` of this object."""
        self._of = of
        self._helper = helper
        self._lock = threading.Lock()
        self._growing = False
        self._whole: App | None = None
        self.links = StageLinks(of.stage, of.secret, of.membership.listener, helper.on_frame, helper.on_lost)
        of.membership.adopt(self)

    @abstractmethod
    def _run(self) -> None:
        """Its links stand: it may begin to compute."""

    @abstractmethod
    def _load(self) -> App:
        """The whole model, beside what it computes meanwhile. Errors: whatever."""

    def _grown(self, app: App) -> None:
        """After its node was told: what else there is to do. In a thread of its own."""

    def connect(self, index: int, link: socket.socket) -> None:
        self.links.connect(index, link)

    def wait_until_ready(self) -> None:
        """Errors: StartFailed if its links do not stand in time."""
        left_s = (self._of.deadline_ns - time.monotonic_ns()) / 1e9
        if not self.links.wait(max(0.0, left_s)):
            raise StartFailed(f"stage {self._of.stage.index}: no links to the other stages of its pipeline in time")
        self._run()

    def grow(self) -> None:
        """Takes the whole model in beside what it does for its pipeline. Once; again only after it failed."""
        with self._lock:
            if self._growing:
                return
            self._growing = True
        threading.Thread(target=self._grow, name="stage-growth", daemon=True).start()

    def speed(self) -> Speed | None:
        """Once it has grown."""
        return self._whole.speed() if self._whole is not None else None

    def close(self) -> None:
        self._helper.close()
        self.links.close()

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._whole is not None:
            await self._whole(scope, receive, send)
        else:
            error = Unavailable("this worker has a stage and takes no calls", retry_after_s=0)
            await respond_error(send, error, "")

    def on_end(self, why: str) -> None:
        """Its pipeline is no more. Who grows meanwhile goes on without it."""
        if self._growing:
            log.info("the pipeline ended, the stage grows on", extra={"why": why})
        else:
            self._of.end(why)

    def _grow(self) -> None:
        try:
            app = self._load()
        except Exception as error:
            log.exception("the stage could not grow")
            with self._lock:
                self._growing = False
            if self._helper.ended:
                self._of.end(f"it could not grow: {error}")
            return
        self._whole = app
        self._of.whole()
        self._grown(app)
