"""Errors of HEAD requests are carried whole by headers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.cli.api_client import error_of
from fleetstart.controller.http.head_errors import TEXT_MAX, error_info_headers
from fleetstart.runtime.contract.errors import ErrorInfo, FleetError, StoreFailed
from tests.controller.conftest import ControllerProcess

SENTENCES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=TEXT_MAX)


@pytest.mark.slow
@given(SENTENCES, SENTENCES)
def test_an_error_survives_the_way_through_headers(message: str, hint: str) -> None:
    told = {name.decode(): value.decode("ascii") for name, value in error_info_headers(
        ErrorInfo(code="store_error", message=message, hint=hint))}  # fmt: skip
    assert all(value.isprintable() for value in told.values())
    error = error_of(502, b"", {"fs-error": "store_error", **told})
    assert isinstance(error, StoreFailed)
    assert error.message == message.strip(" ").rstrip().removesuffix(":")
    assert error.hint == hint.strip(" ")


def test_a_head_request_of_a_real_controller_carries_its_error(controller: ControllerProcess) -> None:
    answer = controller.http.head("/api/v1/objects/elsewhere/x")
    assert (answer.status_code, answer.content) == (400, b"")
    error = error_of(answer.status_code, answer.content, answer.headers)
    assert error.code == answer.headers["fs-error"] == "invalid_input"
    assert "'elsewhere/x' is not allowed" in error.message
    assert "bundles/SHA256" in error.hint


def test_no_error_ends_in_a_colon() -> None:
    for status in (403, 502, 599):
        assert not error_of(status, b"").message.rstrip().endswith(":")
    assert FleetError(f"the store did not answer: {OSError()}").message == "the store did not answer"
