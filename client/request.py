"""One logical call as it is sent: options, input, headers. All its tries send the same bytes and the same key."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

from fleetstart.runtime.contract.call_format import encode_input


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """Options that the calls of a function have in common."""

    timeout_s: float
    path: str = ""
    method: str = ""
    """Empty: POST with a body or without a path, GET otherwise."""
    headers: Mapping[str, str] = field(default_factory=dict)
    idempotency_key: str = ""
    """Empty: a random key for each call."""
    webhook: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRequest:
    name: str
    """Function, and version or alias after an `@`."""
    method: str
    target: str
    headers: Mapping[str, str]
    content: bytes | None
    timeout_s: float
    repeatable: bool
    """True if the server runs it once, however often it is sent."""
    limits_run: bool = True
    """True if `timeout_s` bounds the handler too; that of an async call has its function's time."""


def call_request(name: str, options: CallOptions, input: Any, arguments: Mapping[str, Any]) -> CallRequest:
    """Request of a synchronous call. Errors: TypeError if the input cannot be sent."""
    key = options.idempotency_key or str(uuid.uuid4())
    return _request(name, options, input, arguments, {"idempotency-key": key}, repeatable=True)


def async_request(name: str, options: CallOptions, input: Any, arguments: Mapping[str, Any]) -> CallRequest:
    """Request that submits an async invocation. Errors: as `call_request`."""
    key = options.idempotency_key or str(uuid.uuid4())
    own = {"idempotency-key": key, "prefer": "respond-async"}
    if options.webhook:
        own["fs-webhook"] = options.webhook
    call = _request(name, options, input, arguments, own, repeatable=True)
    return replace(call, limits_run=False)


def stream_request(name: str, options: CallOptions, input: Any, arguments: Mapping[str, Any]) -> CallRequest:
    """Request of a stream. It has no key unless one was given: a call with a key goes on when its client leaves, and
    who leaves a stream wants it ended. Errors: as `call_request`."""
    own = {"accept": "text/event-stream, */*"}
    if options.idempotency_key:
        own["idempotency-key"] = options.idempotency_key
    return _request(name, options, input, arguments, own, repeatable=bool(options.idempotency_key))


def _request(
    name: str, options: CallOptions, input: Any, arguments: Mapping[str, Any], own: dict[str, str], *, repeatable: bool
) -> CallRequest:
    content, content_type = encode_input(input, arguments)
    path = options.path if options.path.startswith("/") or not options.path else f"/{options.path}"
    if content_type:
        own["content-type"] = content_type
    return CallRequest(
        name=name,
        method=(options.method or ("POST" if content is not None or not path else "GET")).upper(),
        target=f"/fn/{quote(name, safe='@')}{path}",
        headers={**own, **{key.lower(): value for key, value in options.headers.items()}},
        content=content,
        timeout_s=options.timeout_s,
        repeatable=repeatable,
    )
