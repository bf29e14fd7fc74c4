"""Decisions about calls from function to function: whether one is allowed, its deadline, its idempotency key. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Sequence

from fleetstart.runtime.contract.billing.ledger import TraceContext
from fleetstart.runtime.contract.errors import CallLoop, CallNotDeclared, DeadlineExceeded, InvalidInput
from fleetstart.runtime.contract.function.names import FULL_NAME_MAX, full_name, project_of
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.function_calls import DEPTH_MAX, CallRequest
from fleetstart.runtime.contract.ids import FunctionName
from fleetstart.runtime.contract.worker_headers import SCHEDULED_HEADER

from ..auth.authorize import Caller
from ..http.asgi import RawHeaders
from ..http.headers import HOP_BY_HOP
from ..http.request_context import traceparent
from ..state.access_records import KeyRecord

_PATH = re.compile(r"/[!-~]*")
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,256}")
_VALUE = re.compile(r"[\t -~\x80-\xff]*")


OWN_HEADERS = {
    "prefer": "calls of functions are synchronous: for several at a time, use threads or acall",
    "fs-webhook": "calls of functions are synchronous: use the answer",
    "fs-ttl-s": "calls of functions are synchronous: use the answer",
    "fs-timeout-s": "write call.with_options(timeout_s=...)",
    "x-request-id": "the gateway makes one, which fs trace of the caller shows",
}
"""Headers that a client may set and a function may not, with what to do instead."""
_OURS = frozenset(("content-length", "expect", "tracestate", SCHEDULED_HEADER))
"""Headers of a function's call that the platform writes, or that say what it alone knows: those of a client's call are
dropped before they come here."""


def caller_of(spec: FunctionSpec) -> Caller:
    """The caller that a function is when it calls others: it may invoke those of its `calls`, in its project, and
    nothing else."""
    record = KeyRecord(
        name=f"function {spec.name}",
        rights=["invoke"],
        functions=_full_names(spec),
        project=spec.home,
        credentials=[],
        created_unix_ms=0,
        created_by=spec.name,
    )
    return Caller(name=record.name, key=record)


def check_declared(spec: FunctionSpec, callee: str) -> None:
    """Checks that the function names the callee in `calls`. Errors: CallNotDeclared."""
    if callee not in _full_names(spec):
        declared = ", ".join(repr(name) for name in (*spec.calls, callee[:FULL_NAME_MAX]))
        raise CallNotDeclared(
            f"function {spec.name} calls {callee[:FULL_NAME_MAX]}, which its setting `calls` does not name: it names "
            f"{', '.join(spec.calls) or 'none'}",
            hint=f"deploy it with @function(calls=[{declared}])",
        )


def check_chain(chain: Sequence[str], callee: str) -> None:
    """Checks that the functions above a call, the caller last, may call this one. Errors: CallLoop."""
    path = " → ".join((*chain, callee))
    if callee in chain:
        raise CallLoop(
            f"functions call each other in a circle: {path}", hint="let the first of them call what it needs itself"
        )
    if len(chain) > DEPTH_MAX:
        raise CallLoop(
            f"function {callee} would be called {len(chain)} functions deep, {DEPTH_MAX} at most: {path}",
            hint="let one function call the others one after the other",
        )


def check_request(request: CallRequest) -> None:
    """Checks what a worker wrote into a request line and headers, as a server's parser does for a client.

    A path that does not begin with a slash would be a part of the function's name. Errors: InvalidInput.
    """
    if not _PATH.fullmatch(request.path) or not _TOKEN.fullmatch(request.method):
        raise InvalidInput(f"{request.method[:20]!r} {request.path[:80]!r} is no method and path of a call")
    for name, value in request.headers:
        if (advice := OWN_HEADERS.get(name.lower())) is not None:
            raise InvalidInput(f"a function's call has no header {name} of its own", hint=advice)
        if not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise InvalidInput(f"header {name[:80]!r} of a call is no name and value that HTTP has")


def call_headers(request: CallRequest, context: TraceContext) -> RawHeaders:
    """The headers that a function gave its call, with its trace: its own span's if that is of this trace."""
    own = ""
    headers: RawHeaders = []
    for name, value in request.headers:
        key = name.lower()
        if key == "traceparent":
            own = value if context.trace_id and value[3:35] == context.trace_id else ""
        elif key not in _OURS and key not in HOP_BY_HOP:
            headers.append((key.encode("latin-1"), value.encode("latin-1")))
    if context.trace_id:
        headers.append((b"traceparent", own.encode("latin-1") or traceparent(context)))
        if context.state:
            headers.append((b"tracestate", context.state.encode()))
    return headers


def time_left_s(callee: str, caller_ends_ns: int, asked_s: float | None, now_ns: int) -> float:
    """The time that a call gets at most: what its caller has left, or less if it asked for less.

    Errors: DeadlineExceeded if nothing is left.
    """
    left_s = (caller_ends_ns - now_ns) / 1e9
    if left_s <= 0:
        raise DeadlineExceeded(f"function {callee} was not called: the time of the call that needs it is up")
    return left_s if asked_s is None or not asked_s > 0 else min(left_s, asked_s)


def repeat_key(caller_key: str, caller: FunctionName, request: CallRequest, body: bytes) -> str:
    """The idempotency key of a call by a call that may be repeated: the same for the same call of each repetition."""
    digest = hashlib.sha256()
    for part in (caller_key, caller, request.function, request.version, request.method, request.path, request.number):
        digest.update(f"{part}\0".encode())
    digest.update(body)
    return f"call:{digest.hexdigest()}"


def missing_callees(spec: FunctionSpec, known: Collection[str]) -> str:
    """A warning that names the functions in `calls` that its project does not have; "" if it has all."""
    missing = [name for name in _full_names(spec) if name not in known or project_of(name) != spec.home]
    if not missing:
        return ""
    return f"function {spec.name} calls {_listed(missing)}, which project {spec.home} does not have yet"


def _full_names(spec: FunctionSpec) -> list[str]:
    """The functions in `calls`, which may leave out their common project."""
    return [full_name(callee, spec.home) for callee in spec.calls]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
