"""Call of a stored request through the gateway: builds its ASGI scope, captures its response.

The gateway sees a client like any other. A cancellation disconnects that client, which makes the gateway cancel the
call at its worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from urllib.parse import unquote

import msgspec

from fleetstart.runtime.contract.decoding import UNDECODABLE
from fleetstart.runtime.contract.errors import ErrorBody, ErrorInfo, FleetError, TooLarge, WorkerLost
from fleetstart.runtime.contract.worker_headers import ERROR_HEADER, PROGRESS_HEADER, AnswerHead

from ..http.asgi import OWN_EVENTS, Message, RawHeaders, Scope
from ..http.headers import response_headers
from ..http.invoke_url import PREFIX
from ..http.scope import GIVEN_REQUEST_ID, REPEAT_KEY, STORED_CALL, StoredCall
from ..state.invocation_records import Answer, Envelope, run_id
from .progress_split import ProgressSplitter
from .store.event_log import EventSplitter, error_of, without_id
from .store.lifecycle import RunOutcome
from .store.payloads import ANSWER_MAX_BYTES

ERROR_MAX_BYTES = 64 * 1024
_NOT_KEPT = frozenset(
    (
        b"content-length",
        b"connection",
        b"transfer-encoding",
        b"server-timing",
        b"x-request-id",
        PROGRESS_HEADER.encode(),
    )
)


def scope_of(envelope: Envelope, run: int, stored: StoredCall) -> Scope:
    path, _, query = envelope.target.partition("?")
    headers: RawHeaders = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in envelope.headers]
    headers.append((b"content-length", b"%d" % envelope.body_bytes))
    headers.append((b"x-request-id", run_id(envelope.id, run).encode()))
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": envelope.method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode("latin-1"),
        "query_string": query.encode("latin-1"),
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
        "fs.key": envelope.key,
        STORED_CALL: stored,
        REPEAT_KEY: envelope.id,
        GIVEN_REQUEST_ID: envelope.request_id,
    }


def error_in(code: str, status: int, body: bytes) -> ErrorInfo | None:
    """The platform's error in a response; None if its header has no `code`."""
    if not code:
        return None
    try:
        return msgspec.json.decode(body, type=ErrorBody).error
    except UNDECODABLE:
        return ErrorInfo(code=code, message=f"HTTP {status}")


class AnswerCapture:
    """An ASGI `send` that captures the response, and passes the events of a stream to `on_events` as they come."""

    def __init__(
        self,
        claim: int,
        stored: StoredCall,
        gone: asyncio.Event,
        on_events: Callable[[list[bytes]], Awaitable[None]],
    ) -> None:
        self._claim = claim
        self._stored = stored
        self._gone = gone
        self._on_events = on_events
        self._status = 0
        self._headers: RawHeaders = []
        self._splitter: EventSplitter | None = None
        self._progress_splitter: ProgressSplitter | None = None
        self._whole = False
        self._too_large = False
        self._bill: dict[str, object] = {}
        self._stream_error: FleetError | None = None
        self.body = bytearray()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = list(message.get("headers", ()))
            if self._header(b"content-type").startswith("text/event-stream"):
                self._splitter = EventSplitter()
                self._progress_splitter = ProgressSplitter() if self._header(PROGRESS_HEADER.encode()) else None
            return
        piece = message.get("body", b"")
        if self._too_large:
            return
        whole = not message.get("more_body", False)
        events = self._events_in(piece, whole=whole)
        if self._progress_splitter is not None:
            events, piece = self._progress_splitter.take(events)
        if len(self.body) + len(piece) > ANSWER_MAX_BYTES:
            self._too_large = True
            self._gone.set()
            return
        self.body += piece
        self._whole = whole
        bare_events = [bare for event in events if (bare := without_id(event))]
        for event in bare_events:
            self._look_at(event, own=bool(message.get(OWN_EVENTS)))
        if bare_events:
            await self._on_events(bare_events)

    def _events_in(self, piece: bytes, *, whole: bool) -> list[bytes]:
        if self._splitter is None:
            return []
        return self._splitter.feed(piece) + (self._splitter.end() if whole else [])

    def _look_at(self, event: bytes, *, own: bool) -> None:
        """Reads the bill, which the gateway writes itself (`own`), and the error that ended the stream."""
        if event.startswith(b"event: fleetstart\n") and own:
            try:
                self._bill = msgspec.json.decode(event.partition(b"data: ")[2], type=dict[str, object])
            except UNDECODABLE:
                return
        elif event.startswith(b"event: error\n"):
            self._stream_error = error_of(event)

    def _header(self, name: bytes) -> str:
        return next((value.decode("latin-1") for key, value in self._headers if key == name), "")

    def outcome(self, function: str) -> RunOutcome:
        """Returns the call's outcome; an empty one if it was cancelled."""
        if self._too_large:
            limit = TooLarge(
                f"function {function}: its answer has more than the {ANSWER_MAX_BYTES:,} bytes that are kept",
                hint="answer with a reference to the data instead, or call it without Prefer: respond-async",
            )
            return RunOutcome(error=limit.info())
        if not self._status:
            return RunOutcome()
        if not self._whole:
            return RunOutcome(error=WorkerLost(f"function {function}: its worker was lost during the response").info())
        if self._progress_splitter is not None and self._progress_splitter.head is not None:
            self._become(self._progress_splitter.head, root=f"{PREFIX}{function}")
        return RunOutcome(answer=self._answer(), error=self._error(), sent=self._stored.sent)

    def _become(self, head: AnswerHead, *, root: str) -> None:
        """Gives the response the status and headers that it would have had without progress events."""
        ours = [(name, value) for name, value in self._headers if name in (b"fs-version", b"fs-start", b"fs-attempts")]
        self._status = head.status
        own = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in head.headers]
        self._headers = [*ours, *response_headers(own, root=root, keep_length=False)]

    def _error(self) -> ErrorInfo | None:
        if self._stream_error is not None:
            return self._stream_error.info()
        return error_in(self._header(ERROR_HEADER.encode()), self._status, bytes(self.body[:ERROR_MAX_BYTES]))

    def _answer(self) -> Answer:
        bill, version = self._bill, self._header(b"fs-version")
        billed = str(bill.get("billed_ms", "") or self._header(b"fs-billed-ms"))
        return Answer(
            claim=self._claim,
            http_status=self._status,
            headers=[
                (name.decode("latin-1"), value.decode("latin-1"))
                for name, value in self._headers
                if name not in _NOT_KEPT
            ],
            body_bytes=len(self.body),
            content_type=self._header(b"content-type"),
            billed_ms=int(billed) if billed.isdecimal() else 0,
            cost=str(bill.get("cost", "") or self._header(b"fs-cost")),
            version=int(version) if version.isdecimal() else 0,
            start=str(bill.get("start", "") or self._header(b"fs-start")),
        )
