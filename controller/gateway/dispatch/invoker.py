"""One call, from its slot on a worker to the last byte of its answer.

Tries again on another worker what did not begin to answer: a worker that was full or draining ran nothing; one
that died under the call may have, and a third death of that kind is the call's own doing. How it gets its slot is for
`seating`, what becomes of an answer for `answers`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NoReturn

import aiohttp

from fleetstart.runtime.contract.errors import OutOfMemory, WorkerLost
from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.node.orders import WorkerStatus

from ...http.asgi import Send
from .backend import BUSY_NS, SUSPECT_NS, Call, Route, Worker
from .host_liveness import HostSilent, HostWatch
from .response_relay import Answers
from .slots import DEATHS_ALLOWED, Seating
from .upstream import Died, HandedBack, Unreached, request

AWAY_NS = 2_000_000_000
"""How long a worker whose host is silent is passed over: by then another one may be ready, or the host back."""


class Invoker:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        seating: Seating,
        answers: Answers,
        *,
        final_status: Callable[[WorkerId], Awaitable[WorkerStatus | None]],
    ) -> None:
        self._session = session
        self._seating = seating
        self._answers = answers
        self._final_status = final_status

    async def run(self, route: Route, call: Call, send: Send) -> None:
        """Answers the call. Errors: FleetError if nothing was sent yet, Cut if something was."""
        again = False
        while True:
            worker = await self._seating.seat(route, call, again=again)
            try:
                await self._attempt(route, call, worker, send)
                return
            except HandedBack:
                self._seating.hand_back(route, call, worker, BUSY_NS)
            except Unreached:
                self._seating.hand_back(route, call, worker, SUSPECT_NS)
            except HostSilent:
                self._seating.hand_back(route, call, worker, AWAY_NS)
            except Died:
                self._seating.hand_back(route, call, worker, SUSPECT_NS)
                call.deaths += 1
                if call.deaths >= DEATHS_ALLOWED:
                    await self._give_up(route, call, worker)
            again = True

    async def _attempt(self, route: Route, call: Call, worker: Worker, send: Send) -> None:
        watch = HostWatch(worker.status.endpoint)
        try:
            response = await watch.wait(request(self._session, call, worker))
            try:
                await self._answers.pass_on(route, call, worker, response, watch, send)
            finally:
                response.release()
        finally:
            watch.close()

    async def _give_up(self, route: Route, call: Call, worker: Worker) -> NoReturn:
        status = await self._final_status(worker.id)
        cause = status.error if status is not None else None
        deaths = f"{call.deaths} workers ended under this call"
        hint = f"`fs logs {route.key.name}` has their last words"
        if cause is not None and cause.code == OutOfMemory.code:
            raise OutOfMemory(f"function {route.key.name}: {deaths}: {cause.message}", hint=cause.hint or hint)
        why = cause.message if cause is not None else "they closed the connection without an answer"
        raise WorkerLost(f"function {route.key.name}: {deaths}: {why}", hint=hint)
