"""Errors of request parameters, with the parameter's name."""

from __future__ import annotations

from ..contract.errors import InvalidInput, Refused


class InvalidParameter(InvalidInput):
    """Error of an invalid or unsupported parameter, with its name."""

    def __init__(self, message: str, param: str | None = None, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.param = param


class ModelNotFound(Refused):
    """Error of a request for another model."""

    code = "model_not_found"
    status = 404
    param = "model"


def check_range(name: str, value: float | None, low: float, high: float) -> None:
    """Checks a number that may be absent. Errors: InvalidParameter."""
    if value is not None and not low <= value <= high:
        raise InvalidParameter(f"{name} must be {low:g} to {high:g}, is {value:g}", name)


def check_limit(name: str, value: int | None) -> int | None:
    """A limit in tokens, if it is given. Errors: InvalidParameter."""
    if value is not None and value < 1:
        raise InvalidParameter(f"{name} must be at least 1, is {value}", name)
    return value
