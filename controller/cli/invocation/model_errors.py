"""Errors of language models and other functions in OpenAI's form: `{"error": {"message": ..., "type": ...}}`."""

from __future__ import annotations

import msgspec

from fleetstart.runtime.contract.decoding import UNDECODABLE
from fleetstart.runtime.contract.errors import ErrorInfo, FleetError, error_from


class _Error(msgspec.Struct, frozen=True):
    message: str
    type: str
    code: str | int | None = None
    hint: str = ""


class _Body(msgspec.Struct, frozen=True):
    error: _Error


def model_error(body: bytes | str) -> FleetError | None:
    """The error in a body or event; None if it has another form, as the platform's own and those of other handlers."""
    try:
        found = msgspec.json.decode(body, type=_Body).error
    except UNDECODABLE:
        return None
    return error_from(ErrorInfo(code=str(found.code or found.type), message=found.message, hint=found.hint))
