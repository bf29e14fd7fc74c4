"""Request options, read from headers and validated: async, waiting and retention times, webhook, idempotency key."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from fleetstart.runtime.contract.errors import InvalidInput
from fleetstart.runtime.contract.function.public_addresses import Network

from ..http.asgi import RawHeaders
from ..http.headers import HOP_BY_HOP
from .idempotency.numbered_events import parse_last_id
from .webhooks.signing import check_url

WATCHED = frozenset((b"prefer", b"idempotency-key", b"fs-webhook"))
"""Headers that make a call async or idempotent."""
TTL_S = 86_400
TTL_MAX_S = 30 * 86_400
QUEUE_S = 3_600
QUEUE_MAX_S = 86_400
WAIT_MAX_S = 300
KEY_MAX = 255
_OURS = frozenset(
    (
        "prefer",
        "idempotency-key",
        "fs-webhook",
        "fs-ttl-s",
        "fs-queue-timeout-s",
        "x-request-id",
        "content-length",
        "expect",
    )
)  # fmt: skip
_SECRETS = frozenset(("authorization", "proxy-authorization", "cookie"))
"""Headers that are not stored; a stored call runs without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    respond_async: bool = False
    wait_s: int = 0
    key: str = ""
    last: int = 0
    """Number of the last event that the client of a keyed stream has."""
    webhook: str = ""
    ttl_s: int = TTL_S
    queue_s: int = QUEUE_S

    @property
    def nothing(self) -> bool:
        return not self.respond_async and not self.key


def has_options(headers: RawHeaders) -> bool:
    """Checks whether the call has any of the watched headers. This is all that a plain call costs."""
    for name, _ in headers:  # noqa: SIM110 - a generator would take three times as long
        if name in WATCHED:
            return True
    return False


def read_options(headers: RawHeaders, allowed: Sequence[Network]) -> RequestOptions:
    """Reads the options. Errors: InvalidInput, WebhookRefused."""
    found = {name: value.decode("latin-1") for name, value in headers}
    prefer = ",".join(value.decode("latin-1") for name, value in headers if name == b"prefer")
    respond_async, wait_s = read_prefer(prefer)
    webhook = found.get(b"fs-webhook", "")
    if webhook and not respond_async:
        raise InvalidInput("Fs-Webhook is for async calls", hint="send Prefer: respond-async with it")
    if webhook:
        check_url(webhook, allowed)
    return RequestOptions(
        respond_async=respond_async,
        wait_s=wait_s,
        key=check_key(found[b"idempotency-key"]) if b"idempotency-key" in found else "",
        last=_last_event(found) if b"idempotency-key" in found and not respond_async else 0,
        webhook=webhook,
        ttl_s=_seconds(found, b"fs-ttl-s", TTL_S, TTL_MAX_S),
        queue_s=_seconds(found, b"fs-queue-timeout-s", QUEUE_S, QUEUE_MAX_S),
    )


def read_prefer(text: str) -> tuple[bool, int]:
    """Parses `Prefer` (RFC 7240): whether `respond-async` is set, and the seconds of `wait`. Ignores the rest."""
    respond_async, wait_s = False, 0
    for part in text.replace(";", ",").split(","):
        name, _, value = part.partition("=")
        name, value = name.strip().lower(), value.strip().strip('"')
        if name == "respond-async":
            respond_async = True
        elif name == "wait" and value.isascii() and value.isdecimal():
            wait_s = min(int(value[:9]), WAIT_MAX_S)
    return respond_async, wait_s


def check_key(key: str) -> str:
    """Validates an idempotency key. Errors: InvalidInput."""
    if not 1 <= len(key) <= KEY_MAX or not key.isascii() or not key.isprintable():
        raise InvalidInput(
            f"Idempotency-Key must be 1 to {KEY_MAX} printable ASCII characters", hint="a UUID is a good one"
        )
    return key


def fingerprint(project: str, method: str, target: str, headers: RawHeaders, body: bytes) -> str:
    """Digest of what makes two calls the same one. Credentials are part of it: an answer that was computed for one of a
    function's users is not shown to another one who chose the same key."""
    digest = hashlib.sha256(f"{project}\0{method}\0{target}\0".encode("utf-8", "surrogateescape"))
    for name, value in headers:
        if name in (b"authorization", b"cookie"):
            digest.update(b"%b:%d:%b\0" % (name, len(value), value))
    digest.update(body)
    return digest.hexdigest()


def kept_headers(headers: RawHeaders) -> list[tuple[str, str]]:
    """The headers that a stored call sends to its worker."""
    pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
    dropped = HOP_BY_HOP | _OURS | _SECRETS
    return [(name, value) for name, value in pairs if name not in dropped]


def _last_event(found: dict[bytes, str]) -> int:
    text = found.get(b"last-event-id", "0")
    last = parse_last_id(text)
    if last is None:
        raise InvalidInput(f"Last-Event-ID {text[:40]!r} is invalid", hint="leave it out to read from the start")
    return last


def _seconds(found: dict[bytes, str], name: bytes, default: int, most: int) -> int:
    text = found.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= most:
        raise InvalidInput(f"{name.decode()}: {text[:40]!r} must be a whole number of seconds from 1 to {most}")
    return int(text)
