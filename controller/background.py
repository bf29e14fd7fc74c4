"""Background tasks of the controller, restarted after a failure."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

log = logging.getLogger(__name__)

RESTART_S = 0.5


class BackgroundTask(Protocol):
    """A part of the controller that runs for as long as it serves."""

    async def run(self) -> None: ...


async def run_with_restarts(part: BackgroundTask) -> None:
    """Runs a task and restarts it after an exception: a bug in one must not stop calls of hot functions."""
    while True:
        try:
            await part.run()
        except Exception:
            log.exception("a background task failed and is restarted", extra={"task": type(part).__name__})
            await asyncio.sleep(RESTART_S)
