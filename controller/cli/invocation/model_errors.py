"""Errors of language models and other functions in OpenAI's form: `{"error": {"message": ..., "type": ...}}`."""

from __future__ import annotations

import msgspec

from fleetstart.runtime.contract.decoding import UNDECODABLE
from fleetstart.runtime.contract.errors import FleetError


class _Error(msgspec.Struct, frozen=True):
    message: str
    type: str
    hint: str = ""


class _Body(msgspec.Struct, frozen=True):
    error: _Error


def model_error(body: bytes | str) -> FleetError | None:
    """The error in a body or event; None if it has another form, as the platform's own and those of other handlers.

    Its code is the function's own and stands for no error of the platform: "not_found" is not a missing function.
    """
    try:
        found = msgspec.json.decode(body, type=_Body).error
    except UNDECODABLE:
        return None
    return FleetError(found.message, hint=found.hint)
