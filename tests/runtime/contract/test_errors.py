"""The error tree: every class travels whole, and the docstring's drawing is the tree."""

from __future__ import annotations

import re

import msgspec
import pytest

from fleetstart.runtime.contract import errors
from fleetstart.runtime.contract.errors import ErrorBody, ErrorInfo, FleetError, error_from

CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, FleetError)]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_survives_the_way_to_another_process(kind: type[FleetError]) -> None:
    sent = kind("what happened", hint="what to do", retry_after_s=1.5)
    body = msgspec.json.encode(ErrorBody.of(sent, "r"))
    received = error_from(msgspec.json.decode(body, type=ErrorBody).error)
    assert type(received) is kind
    assert (received.message, received.hint, received.retry_after_s) == ("what happened", "what to do", 1.5)


@pytest.mark.parametrize(
    ("kind", "type"),
    [
        (errors.InvalidInput, "invalid_request_error"),
        (errors.Unauthorized, "authentication_error"),
        (errors.Forbidden, "permission_error"),
        (errors.NotFound, "not_found_error"),
        (errors.QueueFull, "rate_limit_error"),
        (errors.RateLimited, "rate_limit_error"),
        (errors.CallLoop, "server_error"),
        (errors.Unavailable, "server_error"),
    ],
)
def test_a_body_says_in_the_words_of_openai_of_what_kind_it_is(kind: type[FleetError], type: str) -> None:
    body = msgspec.to_builtins(ErrorBody.of(kind("m"), "r"))
    assert body == {"error": {"code": kind.code, "type": type, "message": "m"}, "request_id": "r"}


def test_codes_are_distinct() -> None:
    assert len({kind.code for kind in CLASSES}) == len(CLASSES)


def test_an_unknown_code_is_still_an_error() -> None:
    received = error_from(ErrorInfo(code="from_the_future", message="m"))
    assert type(received) is FleetError
    assert received.status == 500


def test_the_drawn_tree_names_every_class_with_its_status_and_code() -> None:
    drawn = {
        match[1]: (int(match[2]), match[3]) for match in re.finditer(r"─ (\w+) +(\d{3})  (\w+)", errors.__doc__ or "")
    }
    roots = {"FleetError", "Refused"}
    assert drawn == {kind.__name__: (kind.status, kind.code) for kind in CLASSES if kind.__name__ not in roots}
