"""The interface of a function: its input and output types, read from the handler's source at deploy. Part of its spec.

It is known while no worker runs, and no code has to run for it. JSON schemas refer to each other as
`#/components/schemas/NAME`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

INTERFACE_MAX_BYTES = 24 * 1024
"""Above this size a deploy leaves the schemas out: the spec travels with each order for a worker."""

Schema = dict[str, Any]


class Interface(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    takes: Literal["fields", "whole", "bytes", "asgi", "llm", "unknown"]
    """Form of the input: the parameters as an object's fields, any JSON value, raw bytes; or an app that has its
    own."""
    gives: Literal["json", "bytes", "events", "response"] = "json"
    input: Schema = {}
    output: Schema = {}
    """Schema of the result, or of each event."""
    files: bool = False
    """True if the input has or may have files, sent as multipart/form-data."""
    schemas: dict[str, Schema] = {}
    """Named schemas that `input` and `output` refer to."""
    description: str = ""
