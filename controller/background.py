"""What of the controller works in the background for as long as it serves."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

log = logging.getLogger(__name__)

RESTART_S = 0.5


class BackgroundTask(Protocol):
    async def run(self) -> None: ...


async def run_with_restarts(part: BackgroundTask) -> None:
    """A bug in one part must not take the door down with it: calls of hot functions need none of them."""
    while True:
        try:
            await part.run()
        except Exception:
            log.exception("a part of the controller failed and is started again", extra={"part": type(part).__name__})
            await asyncio.sleep(RESTART_S)
