"""Replay recorder: stores synchronous calls of functions with `keep_requests`, so that `fs replay` can repeat them.

The response goes out first; request and response are stored afterwards, as an invocation that has ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.ids import FunctionName, InvocationId, new_invocation_id
from fleetstart.runtime.contract.process.tasks import end_tasks

from ..http.asgi import Message, Receive, Scope, Send
from ..http.headers import valid_request_id
from ..http.invoke_url import PREFIX
from ..http.request_body import declared_bytes, header
from ..state.invocation_records import Envelope
from ..state.redis_client import REDIS_ERRORS
from ..state.view import View
from .idempotency.response_recorder import ANSWER_BYTES, ResponseRecorder
from .request_options import RequestOptions
from .store import lifecycle
from .store.invocations import InvocationStore
from .store.lifecycle import RunOutcome
from .store.payloads import REQUEST_MAX_BYTES, PayloadStore
from .submit import envelope_of

log = logging.getLogger(__name__)

WRITING_MAX = 64
"""Copies that may be in flight to the store; calls beyond are not stored, so that a slow store does not fill memory."""

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class ReplayRecorder:
    def __init__(self, gateway: App, view: View, invocations: InvocationStore, payloads: PayloadStore) -> None:
        self._gateway = gateway
        self._view = view
        self._invocations = invocations
        self._payloads = payloads
        self._writing: set[asyncio.Task[None]] = set()
        self.functions: frozenset[FunctionName] = frozenset()
        """Functions whose live version has `keep_requests`."""
        self._changes = view.follow()
        self._changes.functions.update(view.functions)
        view.on_change(self._look)

    def _look(self) -> None:
        changed = self._changes.take_functions()
        if changed:
            kept = {name for name in changed if (live := self._view.live(name)) and live.spec.keep_requests}
            if kept or not self.functions.isdisjoint(changed):
                self.functions = self.functions - changed | kept

    def wanted(self, path: str) -> bool:
        name, _, _ = path.removeprefix(PREFIX).partition("/")
        return name.partition("@")[0] in self.functions

    async def close(self) -> None:
        await end_tasks(self._writing)

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        if declared_bytes(scope) > REQUEST_MAX_BYTES or len(self._writing) >= WRITING_MAX:
            await self._gateway(scope, receive, send)
            return
        request_id = InvocationId(valid_request_id(header(scope, b"x-request-id")) or new_invocation_id())
        body = bytearray()

        async def listening() -> Message:
            message = await receive()
            if message["type"] == "http.request" and len(body) <= REQUEST_MAX_BYTES:
                body.extend(message.get("body", b""))
            return message

        recorder = ResponseRecorder(send, ANSWER_BYTES, _nothing)
        headers = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
        headers.append((b"x-request-id", request_id.encode()))
        await self._gateway({**scope, "headers": headers}, listening, recorder)
        if recorder.ran and recorder.whole and not recorder.too_large and len(body) <= REQUEST_MAX_BYTES:
            envelope = envelope_of(scope, request_id, bytes(body), RequestOptions(), origin="sync")
            task = asyncio.get_running_loop().create_task(self._write(envelope, bytes(body), recorder))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    async def _write(self, envelope: Envelope, body: bytes, recorder: ResponseRecorder) -> None:
        now_unix_ms = time.time_ns() // 1_000_000
        ended = lifecycle.ended(
            lifecycle.accepted(envelope), envelope, RunOutcome(answer=recorder.answer()), now_unix_ms
        )
        try:
            kept = await self._payloads.keep_request(envelope, body)
            if kept is envelope and ended.answer is not None:
                await self._payloads.keep_answer(envelope.id, ended.answer, bytes(recorder.body))
                await self._invocations.create(envelope, ended)
        except (*REDIS_ERRORS, FleetError) as error:
            log.warning("a call could not be stored", extra={"invocation": envelope.id, "error": str(error)})


async def _nothing() -> None:
    return
