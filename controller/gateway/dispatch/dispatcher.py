"""One call, from its slot on a worker to the last byte of its answer.

Tries again on another worker what did not begin to answer: a worker that was full or draining ran nothing; one
that died under the call may have, and a third death of that kind is the call's own doing. How it gets its slot is for
`slots`, what becomes of an answer for `answers`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NoReturn

import aiohttp

from fleetstart.runtime.contract.errors import OutOfMemory, WorkerLost
from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.node.orders import WorkerStatus

from ...http.asgi import Send
from .backend import BUSY_BACKOFF_NS, SUSPECT_BACKOFF_NS, Call, VersionBackend, Worker
from .host_liveness import HostLiveness, HostSilent
from .response_relay import ResponseRelay
from .slots import DEATHS_ALLOWED, SlotAcquirer
from .upstream import UpstreamBusy, UpstreamDisconnected, UpstreamUnreachable, request

SILENT_BACKOFF_NS = 2_000_000_000
"""How long a worker whose host is silent is passed over: by then another one may be ready, or the host back."""


class Dispatcher:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        slots: SlotAcquirer,
        relay: ResponseRelay,
        *,
        final_status: Callable[[WorkerId], Awaitable[WorkerStatus | None]],
    ) -> None:
        self._session = session
        self._slots = slots
        self._relay = relay
        self._final_status = final_status

    async def run(self, backend: VersionBackend, call: Call, send: Send) -> None:
        """Answers the call. Errors: FleetError if nothing was sent yet, ResponseTruncated if something was."""
        again = False
        while True:
            worker = await self._slots.acquire(backend, call, again=again)
            try:
                await self._attempt(backend, call, worker, send)
                return
            except UpstreamBusy:
                self._slots.release_for_retry(backend, call, worker, BUSY_BACKOFF_NS)
            except UpstreamUnreachable:
                self._slots.release_for_retry(backend, call, worker, SUSPECT_BACKOFF_NS)
            except HostSilent:
                self._slots.release_for_retry(backend, call, worker, SILENT_BACKOFF_NS)
            except UpstreamDisconnected:
                self._slots.release_for_retry(backend, call, worker, SUSPECT_BACKOFF_NS)
                call.deaths += 1
                if call.deaths >= DEATHS_ALLOWED:
                    await self._give_up(backend, call, worker)
            again = True

    async def _attempt(self, backend: VersionBackend, call: Call, worker: Worker, send: Send) -> None:
        watch = HostLiveness(worker.status.endpoint)
        try:
            response = await watch.wait(request(self._session, call, worker))
            try:
                await self._relay.forward(backend, call, worker, response, watch, send)
            finally:
                response.release()
        finally:
            watch.close()

    async def _give_up(self, backend: VersionBackend, call: Call, worker: Worker) -> NoReturn:
        status = await self._final_status(worker.id)
        cause = status.error if status is not None else None
        deaths = f"{call.deaths} workers ended under this call"
        hint = f"`fs logs {backend.key.name}` has their last words"
        if cause is not None and cause.code == OutOfMemory.code:
            raise OutOfMemory(f"function {backend.key.name}: {deaths}: {cause.message}", hint=cause.hint or hint)
        why = cause.message if cause is not None else "they closed the connection without an answer"
        raise WorkerLost(f"function {backend.key.name}: {deaths}: {why}", hint=hint)
