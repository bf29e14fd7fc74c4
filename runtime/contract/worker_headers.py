"""What gateway and worker say to each other over HTTP/1.1, at the worker's endpoint, beside the call itself."""

import msgspec

TOKEN_HEADER = "fs-worker-token"
REQUEST_HEADER = "x-request-id"
TRACEPARENT_HEADER = "traceparent"
TRACESTATE_HEADER = "tracestate"
DEADLINE_HEADER = "fs-deadline-ms"
"""Milliseconds that the call may still take, from when the worker reads it."""
ATTEMPT_HEADER = "fs-attempt"
"""1 for the first worker that is given the call, and one more for each after it."""
DRAINING_HEADER = "fs-draining"
"""On a 503 of a worker that takes no more calls: nothing was run, send it elsewhere."""
BUSY_HEADER = "fs-busy"
"""On a 503 of a worker whose slots are taken: nothing was run, send it elsewhere or wait."""
ERROR_HEADER = "fs-error"
"""Error code, on responses that the platform made; absent on responses that the handler made."""
CONTINUE_HEADER = "fs-continue"
"""On a request: so many bytes at the end of its body are marks of an answer that another worker began and could not
end; with 0, the call begins. On a response: this stream has marks."""
PROGRESS_HEADER = "fs-progress"
"""On a request: tell the call's progress, whatever the caller accepts. On a response: it was told, so this is a stream
of `progress` events and then either the items of a stream, or the answer: an `answer` event with an AnswerHead, and its
body in `piece` events, in base64."""
MARK = b": fs-mark "
"""Begins a comment of an event stream, which the gateway keeps and takes out: with all marks so far, any worker of the
version can go on after the events before this one. What it says is the worker's own matter; a blank line ends it."""


SOCKET_LATE = (1008, "its time is up")
"""Code and reason with which a worker closes a WebSocket at its deadline, should it come there before the gateway."""


class AnswerHead(msgspec.Struct, frozen=True, kw_only=True):
    status: int
    headers: list[tuple[str, str]]
