"""HTTP headers between gateway and worker, at the worker's endpoint."""

import msgspec

from .errors import FleetError

TOKEN_HEADER = "fs-worker-token"
REQUEST_HEADER = "x-request-id"
TRACEPARENT_HEADER = "traceparent"
TRACESTATE_HEADER = "tracestate"
DEADLINE_HEADER = "fs-deadline-ms"
"""Remaining time of the call in milliseconds, from when the worker reads the header."""
ATTEMPT_HEADER = "fs-attempt"
"""Number of the attempt, from 1."""
ROOT_PATH_HEADER = "fs-root-path"
"""Path of the function as it was called, such as `/fn/web` or `/fn/web@2`: what an ASGI app is mounted at."""
DRAINING_HEADER = "fs-draining"
"""Marks a 503 of a draining worker: nothing was run, another worker can take the call."""
BUSY_HEADER = "fs-busy"
"""Marks a 503 of a worker without a free slot: nothing was run, another worker can take the call, or this one later."""
ENTERED_HEADER = "fs-entered"
"""On a response: number of calls that the worker has entered (`node.entered_calls`)."""
ERROR_HEADER = "fs-error"
"""Error code of a response of the platform; absent on the handler's own responses."""
RETRY_HEADER = "x-should-retry"
"""`false` on an error of the platform that is not to be tried again: OpenAI's clients, and others like them, would
repeat every 408, 409, 429 and 5xx."""
CONTINUE_HEADER = "fs-continue"
"""Stream resumption. On a request: the number of bytes at the end of its body that are resume marks of an answer that a
lost worker began; 0 for a new call. On a response: the stream carries resume marks."""
STREAM_HEADER = "fs-stream"
"""Calls that outlive their gateway. On a request: `keep`, it goes on without its connection, and its answer is kept;
`attach`, no call, but the kept answer of the call with this id. On a response: `gone`, it is not
kept any more; `unknown`, there was no such call: it can be sent again."""
END_HEADER = "fs-call-end"
"""On a request with STREAM_HEADER `attach`: it asks for the end of a call that runs, and for no answer. The worker
responds when the call with this id has ended. One of an earlier release has no such answer, and responds at once."""
PROGRESS_HEADER = "fs-progress"
"""Progress events. On a request: report progress, whatever the caller accepts. On a response: it is a stream of
`progress` events and then either the items of a stream, or the answer: an `answer` event with an AnswerHead, and its
body in `piece` events, in base64."""
GRANT_HEADER = "fs-call-grant"
"""On a request to a worker whose function may call others: `GATEWAY:SECRET`, its right to do so until the call ends."""
LINK_HEADER = "fs-call-link"
"""On a WebSocket's handshake: the name of the gateway that opens it for the worker's own calls (`function_calls`)."""
LINK_LIMIT_HEADER = "fs-call-link-limit"
"""Most bytes of a message that the gateway takes, on the same handshake."""
DEPTH_HEADER = "fs-call-depth"
"""On a call that a function made: how many functions are above it, 1 for one that a client's call has made."""
BUFFERED_BYTES = 1 << 20
"""Responses with a Content-Length up to this reach the client whole or not at all: the gateway reads them before it
sends their head, so that the bill is exact, and the worker sends them when they are whole."""
SCHEDULED_HEADER = "fs-scheduled-at"
"""Time at which a call was due that a schedule made."""
RESERVED = b"fs-"
"""Prefix of the platform's own headers. A worker drops a handler's: with these it could say that it ran nothing, or
that the platform has failed."""
MARK = b": fs-mark "
"""Prefix of a resume mark: a comment in an event stream that the gateway stores and removes. With all marks so far, any
worker of the version can go on after the events before this one. Its content is opaque; a blank line ends it."""


SOCKET_LATE = (1008, "its time is up")
"""Close code and reason of a worker for a WebSocket at its deadline, if it acts before the gateway."""


def retry_headers(error: FleetError) -> list[tuple[bytes, bytes]]:
    """The header that keeps clients from repeating a call that ended with this error; none if a repetition can help."""
    return [] if error.retryable else [(RETRY_HEADER.encode(), b"false")]


class AnswerHead(msgspec.Struct, frozen=True, kw_only=True):
    """Status and headers of an answer, in the `answer` event."""

    status: int
    headers: list[tuple[str, str]]
