"""Sends a call to a worker and its response to the client; to another worker if the first one did not run it.

A worker that was full, draining, or not reached ran nothing. One that was lost under the call may have run it, and
`retry_policy` decides whether the call runs again. Small responses are buffered, so that the bill stands in their
headers and nothing is sent of an answer that breaks off; others are streamed (`stream_relay`).
"""

from __future__ import annotations

import asyncio
import io
import logging
import time
from collections.abc import Awaitable, Callable

import aiohttp

from fleetstart.runtime.contract.errors import FleetError, HandlerFailed, WorkerLost
from fleetstart.runtime.contract.ids import FunctionName, InvocationId, WorkerId, new_invocation_id
from fleetstart.runtime.contract.node.orders import WorkerStatus
from fleetstart.runtime.contract.worker_headers import (
    ATTEMPT_HEADER,
    BUFFERED_BYTES,
    BUSY_HEADER,
    CONTINUE_HEADER,
    DEADLINE_HEADER,
    DRAINING_HEADER,
    ENTERED_HEADER,
    ERROR_HEADER,
    REQUEST_HEADER,
    ROOT_PATH_HEADER,
    STREAM_HEADER,
    TOKEN_HEADER,
)

from ...http.asgi import NO_CONTENT, Send
from ...http.client import CONNECTED
from ...http.headers import response_headers
from ...http.keyed_call import KeyedCall, NotAttached
from ..node_links import NodeLinks, NodeNotVouched
from .call_record import CallRecord
from .call_response import bill_headers, platform_headers
from .errors import HostSilent, UpstreamBusy, UpstreamDisconnected, UpstreamUnreachable
from .host_liveness import HostLiveness
from .retry_policy import CLOSED, SILENT, STREAM_DEATHS_ALLOWED, LostWorkers
from .stream_relay import StreamRelay
from .version_backend import SUSPECT_BACKOFF_NS, Attempt, Call, VersionBackend, Worker

log = logging.getLogger(__name__)

SILENT_BACKOFF_NS = 2_000_000_000
"""Backoff of a worker whose host is silent: by then another one may be ready, or the host back."""
LARGE_BODY_BYTES = 1 << 20
"""Bodies beyond are written in pieces, so that other calls get their turn meanwhile."""
ATTACH_S = 3.0
"""How long a gateway that has just started may take to learn of the worker that runs a stream."""
ATTACH_POLL_S = 0.02
LIVES_S = 1.0
"""How long a worker that has closed a connection has to answer another one. By then its node has said if it ended."""

FinalStatus = Callable[[WorkerId], Awaitable[WorkerStatus | None]]


class SlotAcquirer:
    """Acquires a worker slot for a call, queueing if none is free."""

    def __init__(
        self,
        *,
        report_now: Callable[[], None],
        queue_full: Callable[[VersionBackend], FleetError],
        queue_timeout: Callable[[VersionBackend, Call], FleetError],
        status_of: Callable[[FunctionName, WorkerId], WorkerStatus | None],
    ) -> None:
        self._report_now = report_now
        self._queue_full = queue_full
        self._queue_timeout = queue_timeout
        self._status_of = status_of

    async def attach(self, record: CallRecord, keyed: KeyedCall) -> Attempt:
        """Starts an attempt on the worker that runs the call already. Errors: WorkerLost."""
        backend = record.backend
        ends_s = time.monotonic() + ATTACH_S
        assert keyed.worker is not None
        while (status := self._status_of(backend.key.name, keyed.worker)) is None:
            if time.monotonic() > ends_s:
                raise lost_twice(record)
            await asyncio.sleep(ATTACH_POLL_S)
        attempt = backend.attach(record.call, status, time.monotonic_ns())
        record.start_attempt(attempt)
        return attempt

    async def acquire(self, record: CallRecord, *, again: bool) -> Attempt:
        """Starts an attempt, at once or from the queue; `again` for a retry, which goes first.

        Errors: QueueFull, Overloaded, QueueTimeout.
        """
        backend, call = record.backend, record.call
        attempt = backend.try_acquire(call, time.monotonic_ns(), first=again)
        if attempt is None:
            attempt = await self._wait(backend, call, again=again)
        record.start_attempt(attempt)
        return attempt

    async def _wait(self, backend: VersionBackend, call: Call, *, again: bool) -> Attempt:
        queued = backend.requeue(call) if again else backend.enqueue(call)
        if queued is None:
            raise self._queue_full(backend)
        self._report_now()
        wait_s = (call.queue_ends_ns - time.monotonic_ns()) / 1e9 if call.queue_ends_ns and not again else None
        try:
            async with asyncio.timeout(wait_s):
                return await queued.slot
        except TimeoutError:
            backend.withdraw(queued, time.monotonic_ns())
            raise self._queue_timeout(backend, call) from None
        except BaseException:
            backend.withdraw(queued, time.monotonic_ns())
            raise


class Dispatcher:
    """Dispatches the calls of a gateway."""

    def __init__(
        self, session: aiohttp.ClientSession, links: NodeLinks, slots: SlotAcquirer, *, final_status: FinalStatus
    ) -> None:
        self._session = session
        self._links = links
        self._slots = slots
        self._final_status = final_status

    async def run(self, record: CallRecord, send: Send) -> None:
        """Answers the call. Errors: FleetError or NotAttached if nothing was sent yet, ResponseTruncated if something
        was."""
        stream = StreamRelay(record, send, final_status=self._final_status, lives=self._lives)
        lost = LostWorkers(is_async=record.call.stored is not None)
        again, keyed = False, record.call.keyed
        if keyed is not None and keyed.lost is not None:
            raise keyed.lost
        if keyed is not None and keyed.worker is not None:
            again = not await self._attach(record, keyed, stream, lost, send)
            if not again:
                return
        while True:
            attempt = await self._slots.acquire(record, again=again)
            try:
                await self._attempt(record, attempt, stream, send)
                return
            except UpstreamBusy:
                record.release_refused(attempt)
            except UpstreamUnreachable:
                record.release_for_retry(attempt, SUSPECT_BACKOFF_NS)
            except HostSilent:
                record.release_for_retry(attempt, SILENT_BACKOFF_NS)
                await self._lost(record, attempt, lost, silent=True)
            except UpstreamDisconnected:
                record.release_for_retry(attempt, SUSPECT_BACKOFF_NS, cut=True)
                await self._lost(record, attempt, lost, silent=False)
            again = True

    async def _attach(
        self, record: CallRecord, keyed: KeyedCall, stream: StreamRelay, lost: LostWorkers, send: Send
    ) -> bool:
        """Goes on with a call where it runs; False if another worker is to continue its stream.

        Errors: WorkerLost, NotAttached.
        """
        attempt = await self._slots.attach(record, keyed)
        try:
            await self._attempt(record, attempt, stream, send)
            return True
        except (UpstreamBusy, UpstreamUnreachable, UpstreamDisconnected, HostSilent) as error:
            record.release_for_retry(attempt, SUSPECT_BACKOFF_NS)
            if not record.begun and (keyed.resumed or not isinstance(error, UpstreamBusy)):
                raise lost_twice(record) from error
            if isinstance(error, UpstreamBusy):
                raise NotAttached(None) from error  # its gateway was lost before the worker had it
            await self._lost(record, attempt, lost, silent=isinstance(error, HostSilent))
            return False

    async def _attempt(self, record: CallRecord, attempt: Attempt, stream: StreamRelay, send: Send) -> None:
        """Errors: UpstreamError, or ResponseTruncated if something was sent that cannot go on."""
        liveness = HostLiveness(attempt.worker.status.endpoint)
        await self._note(record, attempt)
        try:
            try:
                response = await liveness.wait(self._request(record, attempt, stream.resume_state()))
                record.backend.note_entered(attempt.worker, response.headers.get(ENTERED_HEADER, ""))
            except HostSilent:
                if CONNECTED.get():
                    raise
                raise UpstreamUnreachable from None
            try:
                headers = response.headers
                if response.status == 503 and (BUSY_HEADER in headers or DRAINING_HEADER in headers):
                    await liveness.wait(_read(response))
                    raise UpstreamBusy
                if response.status < 200:
                    response.close()
                    text = f"function {record.backend.key.name}: its worker answered HTTP {response.status}"
                    raise HandlerFailed(text, hint="only a WebSocket switches the protocol, and it begins as one")
                if _attaches(record) and STREAM_HEADER in headers:
                    await liveness.wait(_read(response))
                    raise UpstreamBusy if headers[STREAM_HEADER] == "unknown" else UpstreamUnreachable
                if not record.begun and _fits_buffer(record.call, response):
                    await self._send_buffered(record, attempt, response, await liveness.wait(_read(response)), send)
                else:
                    await stream.forward(attempt, response, liveness)
            finally:
                response.release()
        finally:
            liveness.close()

    async def _note(self, record: CallRecord, attempt: Attempt) -> None:
        """Notes which worker gets a keyed call, before it gets it: no gateway that goes on with it runs it twice."""
        call = record.call
        if call.keyed is not None and not _attaches(record):
            left_s = (call.deadline_ns - time.monotonic_ns()) / 1e9
            await call.keyed.sent_to(attempt.worker.id, record.backend.key.version, left_s)

    async def _request(self, record: CallRecord, attempt: Attempt, resume_state: bytes) -> aiohttp.ClientResponse:
        """Sends the request; returns when the response's head has come.

        Errors: UpstreamUnreachable, UpstreamDisconnected.
        """
        call, status = record.call, attempt.worker.status
        left_ms = max(0, call.deadline_ns - time.monotonic_ns()) // 1_000_000
        headers = [
            *call.headers,
            (TOKEN_HEADER, status.token),
            (REQUEST_HEADER, _id_at_worker(record)),
            (DEADLINE_HEADER, str(left_ms)),
            (ATTEMPT_HEADER, str(record.number)),
            (CONTINUE_HEADER, str(len(resume_state))),
            (ROOT_PATH_HEADER, call.root),
            *record.call_headers(),
        ]
        if call.keyed is not None:
            headers.append((STREAM_HEADER, "attach" if _attaches(record) else "keep"))
        content = call.body + resume_state
        body: bytes | io.BytesIO | None = content or None
        if len(content) > LARGE_BODY_BYTES:
            body = io.BytesIO(content)
        try:
            url, tls = self._links.target(status, call.target)
            return await self._session.request(
                call.method, url, headers=headers, data=body, allow_redirects=False, **tls
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, NodeNotVouched) as error:
            if isinstance(error, (aiohttp.ClientSSLError, NodeNotVouched)):
                log.warning("a worker's node is not trusted", extra={"node": status.node, "error": str(error)})
            raise UpstreamUnreachable from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise UpstreamDisconnected from error

    async def _lives(self, worker: Worker) -> bool:
        """Asks a worker for an answer that it does not have, and so whether it serves."""
        asked = [(TOKEN_HEADER, worker.status.token), (REQUEST_HEADER, new_invocation_id()), (STREAM_HEADER, "attach")]
        try:
            url, tls = self._links.target(worker.status, "/")
            async with asyncio.timeout(LIVES_S), self._session.request("GET", url, headers=asked, **tls) as answer:
                return STREAM_HEADER in answer.headers
        except (aiohttp.ClientError, ConnectionError, TimeoutError):
            return False

    async def _send_buffered(
        self, record: CallRecord, attempt: Attempt, response: aiohttp.ClientResponse, body: bytes, send: Send
    ) -> None:
        record.answered(attempt, response.status, response.headers.get(ERROR_HEADER, ""), time.monotonic_ns())
        record.release(waive=False)
        sized = response.status not in NO_CONTENT
        headers = response_headers(response.raw_headers, root=record.call.root, keep_length=sized)
        headers += platform_headers(record)
        headers += bill_headers(record)
        record.response_started()
        record.finish()
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _lost(self, record: CallRecord, attempt: Attempt, lost: LostWorkers, *, silent: bool) -> None:
        """Counts a lost worker. Errors: OutOfMemory, WorkerLost if the call does not run again."""
        if record.begun and (silent or lost.begun + 1 < STREAM_DEATHS_ALLOWED):
            lost.begun += not silent  # a stream: the next worker continues it, and a silent host is not its doing
            return
        status = None if silent else await self._final_status(attempt.worker.id)
        failure = lost.count(
            record.backend.spec, record.call.id, attempt.entered_before, status, SILENT if silent else CLOSED
        )
        if failure is not None:
            raise failure


def _attaches(record: CallRecord) -> bool:
    """Checks whether the attempt under way reads the answer of a call that runs already."""
    keyed = record.call.keyed
    return keyed is not None and keyed.worker is not None and record.attempts == 1


def _id_at_worker(record: CallRecord) -> InvocationId:
    """The id under which a worker gets the call, or has it already."""
    keyed = record.call.keyed
    if keyed is not None and keyed.invocation is not None and _attaches(record):
        return keyed.invocation
    return record.call.id


def lost_twice(record: CallRecord) -> WorkerLost:
    """The error for a call whose gateway and worker are both lost."""
    return WorkerLost(
        f"function {record.backend.key.name}: the call's gateway was lost, and the worker that kept its answer",
        hint="it may have run; to run it again, call again without Last-Event-ID",
    )


def _fits_buffer(call: Call, response: aiohttp.ClientResponse) -> bool:
    if call.method == "HEAD" or response.status in NO_CONTENT:
        return True
    length = response.headers.get("Content-Length", "")
    return length.isdecimal() and int(length) <= BUFFERED_BYTES


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """Errors: UpstreamDisconnected."""
    try:
        return await response.read()
    except (aiohttp.ClientError, ConnectionError) as error:
        raise UpstreamDisconnected from error
