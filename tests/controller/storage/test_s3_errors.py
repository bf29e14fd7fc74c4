"""Errors of S3: which of them are worth another try in a moment."""

from __future__ import annotations

import pytest
from botocore.exceptions import BotoCoreError, ClientError, EndpointConnectionError, NoCredentialsError

from fleetstart.controller.storage.s3_errors import store_error


def answer(code: str, status: int) -> ClientError:
    response = {"Error": {"Code": code, "Message": "m"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(response, "PutObject")


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (answer("SlowDown", 503), True),
        (answer("InternalError", 500), True),
        (answer("503", 503), True),
        (answer("AccessDenied", 403), False),
        (answer("NotImplemented", 501), False),
        (answer("XMinioStorageFull", 507), False),
        (EndpointConnectionError(endpoint_url="http://127.0.0.1:1"), True),
        (NoCredentialsError(), False),
    ],
)
def test_a_busy_store_is_worth_another_try_and_a_wrong_key_is_not(
    error: ClientError | BotoCoreError, passes: bool
) -> None:
    assert (store_error("bundles/x", error).retry_after_s is not None) == passes
