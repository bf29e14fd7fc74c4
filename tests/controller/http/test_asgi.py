"""Headers of error responses."""

from __future__ import annotations

from fleetstart.controller.http.asgi import error_headers
from tests.docs import error_codes


def test_an_error_says_that_it_is_not_to_be_tried_again_where_the_documentation_does() -> None:
    kinds = list(error_codes.of_the_code())
    assert {kind.retryable for kind in kinds} == {True, False}
    for kind in kinds:
        error = kind.__new__(kind)  # some have arguments of their own
        error.retry_after_s = None
        assert dict(error_headers(error, "")).get(b"x-should-retry") == (None if kind.retryable else b"false"), kind
