"""Answers of functions come from the origin of dashboard and API; a page among them must not act as ours. Pure.

What a browser would run, or might take for something that it runs, gets an origin of its own (`sandbox` without
`allow-same-origin`): it can read neither what our pages keep nor what the API answers, and what it sends there has
`Origin: null`, which `access.door` refuses. A policy of the app's own is kept beside it; browsers obey both.
"""

from __future__ import annotations

RawHeaders = list[tuple[bytes, bytes]]

SANDBOX = b"sandbox allow-scripts allow-forms allow-popups allow-modals allow-downloads"
_JSON = [b"application/json"]
_NOSNIFF = b"x-content-type-options"
_INERT = frozenset((b"application/json", b"application/octet-stream", b"application/pdf", b"text/event-stream",
                    b"text/plain", b"text/csv", b"application/x-ndjson", b"application/zip"))  # fmt: skip
"""What no browser runs as long as it does not guess; whatever is not among these is confined."""
_INERT_KINDS = (b"image/", b"audio/", b"video/", b"font/")


def confined(headers: RawHeaders) -> RawHeaders:
    """The headers of an answer, lower-case, as they go out. JSON, which most answers are, passes at once."""
    kinds = [value for name, value in headers if name == b"content-type"]
    if kinds == _JSON:
        return headers
    own = [pair for pair in headers if pair[0] != _NOSNIFF]
    own.append((_NOSNIFF, b"nosniff"))
    if len(kinds) != 1 or not _is_inert(kinds[0]):
        own.append((b"content-security-policy", SANDBOX))
    return own


def _is_inert(content_type: bytes) -> bool:
    kind = content_type.partition(b";")[0].strip().lower()
    return kind in _INERT or (kind.startswith(_INERT_KINDS) and not kind.endswith(b"xml"))
