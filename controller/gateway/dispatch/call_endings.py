"""The ends of calls at their workers, after their clients have left.

A worker cancels what can be cancelled. A thread goes on, and so does an app that does not listen for the disconnect:
until it ends, it has its slot at the worker, and is billed.
"""

from __future__ import annotations

import asyncio
import time

import aiohttp

from fleetstart.runtime.contract.worker_headers import END_HEADER, REQUEST_HEADER, STREAM_HEADER, TOKEN_HEADER

from ..node_links import NodeLinks
from .call_record import CallRecord
from .errors import HostSilent
from .host_liveness import HostLiveness
from .version_backend import Attempt

FOLLOWED_S = 1.0
"""Time in which a call that was cancelled should have ended, if it is no thread."""


class CallEndings:
    """Waits for the ends of a gateway's calls that have lost their clients."""

    def __init__(self, session: aiohttp.ClientSession, links: NodeLinks) -> None:
        self._session = session
        self._links = links
        self._waits: set[asyncio.Task[None]] = set()
        self._followed: set[asyncio.Task[None]] = set()
        self._stopped = False

    def stop(self) -> None:
        """Ends all waits: calls without clients do not delay a shutdown. They are billed until now."""
        self._stopped = True
        for wait in self._waits:
            wait.cancel()

    async def follow(self, record: CallRecord) -> None:
        """Waits as `wait` does, and closes the record then. Returns after FOLLOWED_S at most, and goes on by itself: an
        async call that was cancelled has ended for those who look at it, mostly with its row."""

        async def following() -> None:
            try:
                await self.wait(record)
            finally:
                record.close()

        task = asyncio.get_running_loop().create_task(following())
        self._followed.add(task)
        task.add_done_callback(self._followed.discard)
        await asyncio.wait({task}, timeout=FOLLOWED_S)

    async def wait(self, record: CallRecord) -> None:
        """Waits until the call of the attempt under way has ended at its worker, or is past its deadline, and frees its
        slot. It is billed until then. What it called ends at once: a thread may wait for that alone."""
        record.end_called()
        attempt = record.attempt
        if attempt is None or not attempt.active:
            return
        try:
            if not self._stopped:
                await self._wait(attempt, record)
        finally:
            record.release(waive=False)

    async def _wait(self, attempt: Attempt, record: CallRecord) -> None:
        left_s = max(0.0, (record.call.deadline_ns - time.monotonic_ns()) / 1e9)
        wait = asyncio.get_running_loop().create_task(self._ask(attempt))
        self._waits.add(wait)
        try:
            await asyncio.wait({wait}, timeout=left_s)
        finally:
            wait.cancel()
            self._waits.discard(wait)

    async def _ask(self, attempt: Attempt) -> None:
        """Asks the worker, which responds when the call has ended. One that is lost has ended it as well."""
        status = attempt.worker.status
        asked = [
            (TOKEN_HEADER, status.token),
            (REQUEST_HEADER, attempt.call.id),
            (STREAM_HEADER, "attach"),
            (END_HEADER, "1"),
        ]
        liveness = HostLiveness(status.endpoint)
        try:
            url, tls = self._links.target(status, "/")
            request = self._session.request("GET", url, headers=asked, data=None, allow_redirects=False, **tls)
            (await liveness.wait(request)).release()
        except (aiohttp.ClientError, ConnectionError, HostSilent):
            return
        finally:
            liveness.close()
