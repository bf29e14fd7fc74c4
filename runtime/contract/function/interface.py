"""What a function takes and gives, as its deploy read it from the handler's source: a part of its spec.

It is there while the function sleeps, and nothing had to be run for it. JSON schemas refer to each other as
`#/components/schemas/NAME`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

INTERFACE_MAX_BYTES = 24 * 1024
"""Beyond it a deploy leaves the schemas out: the spec travels with each order for a worker."""

Schema = dict[str, Any]


class Interface(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    takes: Literal["fields", "whole", "bytes", "asgi", "llm", "unknown"]
    """An object whose fields are the handler's parameters, any JSON value, raw bytes; or who describes itself."""
    gives: Literal["json", "bytes", "events", "response"] = "json"
    input: Schema = {}
    output: Schema = {}
    """Of the answer, or of each event."""
    files: bool = False
    """Whether it takes (or may take) files, which come as multipart/form-data."""
    schemas: dict[str, Schema] = {}
    """That the others refer to."""
    description: str = ""
