"""The error tree, and how an error crosses from one process to the next.

FleetError
├── Refused                      4xx: the caller has to change something
│   ├── InvalidInput             400  invalid_input
│   │   └── ContextExceeded      400  context_length_exceeded  of a language model; OpenAI's own word
│   ├── InvalidSpec              400  invalid_spec
│   ├── NoHandler                400  no_handler
│   ├── HandlerSyntax            400  syntax_error
│   ├── WeightsMissing           400  weights_missing
│   ├── PickleRefused            400  pickle_refused
│   ├── CheckpointInvalid        400  checkpoint_invalid     truncated, overlapping, unreadable
│   ├── BuildFailed              400  build_failed           the requirements could not be installed
│   ├── LayerInvalid             400  layer_invalid          a layer's manifest or bytes are not what they must be
│   ├── Unauthorized             401  unauthorized           no key, or an unknown, expired or revoked one
│   ├── BudgetSpent              402  budget_spent           carries retry_after_s: when the budget renews
│   ├── Forbidden                403  forbidden              a valid key without this right
│   │   └── CallNotDeclared      403  call_not_declared      a function called one that its `calls` does not name
│   ├── QuotaExceeded            403  quota_exceeded         of a project
│   ├── NotFound                 404  not_found
│   ├── Conflict                 409  conflict               a change was based on what is no longer the newest
│   ├── TooLarge                 413  too_large
│   ├── QueueFull                429  queue_full             all workers of scale.max are busy; carries retry_after_s
│   ├── RateLimited              429  rate_limited           the function's or project's limits; carries retry_after_s
│   └── CallLoop                 508  call_loop              functions that call each other in a circle, or too deep
├── CallEnded                    499  call_ended             the call for which a function was called has ended
├── HandlerFailed                500  handler_error          the user's code raised
│   └── InvalidOutput            500  invalid_output         its answer is not what its signature says, or HTTP allows
├── StartFailed                  500  start_failed           the user's module or load() raised, or never got ready
├── OutOfMemory                  500  out_of_memory          the worker passed its memory limit
│   └── DeviceOutOfMemory        500  device_out_of_memory   its share of its devices was too small; it starts with more
├── WorkerLost                   502  worker_lost            the worker died under the call
├── StoreFailed                  502  store_error            the object store failed
├── ChecksumMismatch             502  checksum_mismatch      the bytes are not those that were published
├── Unavailable                  503  unavailable            no node, no room, shutting down; carries retry_after_s
│   ├── Overloaded               503  overloaded             predicted wait too long; carries retry_after_s
│   └── QueueTimeout             503  queue_timeout          waited too long in the queue; carries retry_after_s
└── DeadlineExceeded             504  deadline_exceeded

Codes of the parts: subclasses beside what raises them. `error_from` knows those whose module is imported.

AnswerGone                       502  worker_lost              the worker has no such answer, or not from its start on
AnswerNotKept                    409  idempotency_not_kept     the first response was too large to store
BackupInvalid                    500  backup_invalid           no backup, a damaged one, or one of a later release
ConnectionCut                    503  unreachable              of `fs`: the connection broke during a call
EventsGone                       410  events_gone              the events after `Last-Event-ID` have left the log
HandlerResponse                  500  handler_response         of a caller: the handler's own answer of 400 or more
HeadTimeout                      408  request_timeout          a request's headers took too long to arrive
HeadersTooLarge                  431  headers_too_large        a request's headers have too many bytes, or are too many
InvalidParameter                 400  invalid_input            an invalid or unsupported parameter of a model's API
InvalidPrompt                    400  invalid_input            an empty prompt, or one of tokens that a model lacks
InvalidWorkerToken               401  unauthorized             a caller without the worker's token
KeyBusy                          409  idempotency_in_progress  the first call with the key has not ended
KeyLost                          409  idempotency_lost         the gateway stood still, and another call has the key
KeyMismatch                      409  idempotency_mismatch     the key was used for a different call
ModelNotFound                    404  model_not_found          a request for another model
NotAnswered                      410  not_answered             the async call ended without a response
OriginRejected                   403  origin_refused           the page's origin is not in the function's `cors`
RecordsUnreadable                500  records_unreadable       records that are broken, or of a later release
SecretCipherError                500  vault_closed             the master key is missing or another one
TooManyFollowers                 429  too_many_followers       too many log or event streams are open
Unreachable                      503  unreachable              of `fs`: no server answered at the URL
WebSocketRejected                500  socket_refused           a WebSocket that its app did not accept
WebhookRefused                   400  webhook_refused          the webhook's target is not allowed

Messages say what, which and how much, and `hint` what to do next. `retryable` says whether the same call may
succeed later although nothing was changed. A type error also carries the path of the field (`items[2].price`),
what was expected there and what came.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from .wait_estimate import WaitEstimate


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error as it travels between processes and in the JSON body of a response."""

    code: str
    type: str = ""
    """Kind of error in OpenAI's words, which follows from the status; in bodies of responses only."""
    message: str
    hint: str = ""
    retry_after_s: float | None = None
    wait: WaitEstimate | None = None
    """The figures that `retry_after_s` was computed from, if it was."""
    field: str = ""
    """Path of the invalid field inside the JSON value; empty for the value itself."""
    expected: str = ""
    got: str = ""


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """JSON body of every error response: `{"error": {...}, "request_id": ...}`."""

    error: ErrorInfo
    request_id: str = ""

    @classmethod
    def of(cls, error: FleetError, request_id: str = "") -> ErrorBody:
        """The body of the response to a call that ended with this error."""
        kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
        return cls(error=msgspec.structs.replace(error.info(), type=kind), request_id=request_id)


_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
"""Types of errors in OpenAI's words by their status."""


class FleetError(Exception):
    """An error of the platform: `code`, `status`, `message`, `hint`; `retryable`: whether trying again can help."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        retry_after_s: float | None = None,
        wait: WaitEstimate | None = None,
        field: str = "",
        expected: str = "",
        got: str = "",
    ) -> None:
        message = message.rstrip().removesuffix(":")  # a cause without a word must not leave half a sentence
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.retry_after_s = retry_after_s
        self.wait = wait
        self.field = field
        self.expected = expected
        self.got = got

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles what it is made of, and not how it was: an error that cannot be read again hangs a pool of
        processes."""
        return _restored, (type(self), self.args, vars(self))

    def info(self) -> ErrorInfo:
        return ErrorInfo(
            code=self.code,
            message=_utf8(self.message),
            hint=_utf8(self.hint),
            retry_after_s=self.retry_after_s,
            wait=self.wait,
            field=_utf8(self.field),
            expected=_utf8(self.expected),
            got=_utf8(self.got),
        )


def _restored(kind: type[FleetError], arguments: tuple[Any, ...], fields: dict[str, Any]) -> FleetError:
    error = kind.__new__(kind, *arguments)
    vars(error).update(fields)
    return error


def _utf8(text: str) -> str:
    """The text, with escapes for what UTF-8 has not: the name of a file that is no text, in a user's exception."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


class Refused(FleetError):
    code = "refused"
    status = 400


class InvalidInput(Refused):
    code = "invalid_input"


class ContextExceeded(InvalidInput):
    """A prompt and its answer need more tokens than a language model's context holds."""

    code = "context_length_exceeded"


class InvalidSpec(Refused):
    code = "invalid_spec"


class NoHandler(Refused):
    code = "no_handler"


class HandlerSyntax(Refused):
    code = "syntax_error"


class WeightsMissing(Refused):
    code = "weights_missing"


class PickleRefused(Refused):
    code = "pickle_refused"


class CheckpointInvalid(Refused):
    code = "checkpoint_invalid"


class BuildFailed(Refused):
    code = "build_failed"


class LayerInvalid(Refused):
    code = "layer_invalid"


class Unauthorized(Refused):
    code = "unauthorized"
    status = 401


class Forbidden(Refused):
    code = "forbidden"
    status = 403


class CallNotDeclared(Forbidden):
    """A function called another one that its setting `calls` does not name."""

    code = "call_not_declared"


class QuotaExceeded(Refused):
    code = "quota_exceeded"
    status = 403


class BudgetSpent(Refused):
    code = "budget_spent"
    status = 402
    retryable = True


class NotFound(Refused):
    code = "not_found"
    status = 404


class Conflict(Refused):
    code = "conflict"
    status = 409


class TooLarge(Refused):
    code = "too_large"
    status = 413


class QueueFull(Refused):
    code = "queue_full"
    status = 429
    retryable = True


class RateLimited(Refused):
    code = "rate_limited"
    status = 429
    retryable = True


class CallLoop(Refused):
    """Functions that call each other in a circle, or one below the other more often than is allowed."""

    code = "call_loop"
    status = 508


class CallEnded(FleetError):
    """The call for which a function was called has ended: its caller has gone, or its time is up."""

    code = "call_ended"
    status = 499


class HandlerFailed(FleetError):
    code = "handler_error"


class InvalidOutput(HandlerFailed):
    code = "invalid_output"


class StartFailed(FleetError):
    code = "start_failed"


class OutOfMemory(FleetError):
    code = "out_of_memory"


class DeviceOutOfMemory(OutOfMemory):
    code = "device_out_of_memory"
    retryable = True


class WorkerLost(FleetError):
    code = "worker_lost"
    status = 502
    retryable = True


class StoreFailed(FleetError):
    code = "store_error"
    status = 502
    retryable = True


class ChecksumMismatch(FleetError):
    code = "checksum_mismatch"
    status = 502


class Unavailable(FleetError):
    code = "unavailable"
    status = 503
    retryable = True


class Overloaded(Unavailable):
    code = "overloaded"


class QueueTimeout(Unavailable):
    code = "queue_timeout"


class DeadlineExceeded(FleetError):
    code = "deadline_exceeded"
    status = 504
    retryable = True


def _leaves(root: type[FleetError]) -> list[type[FleetError]]:
    below = [leaf for child in root.__subclasses__() for leaf in _leaves(child)]
    return [root, *below]


_BY_CODE = {error.code: error for error in _leaves(FleetError)}


def error_from(info: ErrorInfo) -> FleetError:
    """Rebuilds the exception of another process from its `ErrorInfo`; an unknown code becomes a FleetError."""
    kind = _BY_CODE.get(info.code, FleetError)
    return kind(
        info.message,
        hint=info.hint,
        retry_after_s=info.retry_after_s,
        wait=info.wait,
        field=info.field,
        expected=info.expected,
        got=info.got,
    )
