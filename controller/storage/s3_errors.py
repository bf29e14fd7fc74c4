"""Explains errors of the S3 client: a sentence that names the cause, and what to do. Pure.

The answer to a HEAD request has no body, so that its error is a status alone: `code_of` gives that status, and the
store asks again by GET.
"""

from __future__ import annotations

from collections.abc import Iterator

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    ReadTimeoutError,
    SSLError,
)

from fleetstart.runtime.contract.errors import StoreFailed

_KEYS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY where `fs up` is called, or use a profile or an instance role"
_RIGHTS = "it needs s3:GetObject, PutObject, DeleteObject, ListBucket and AbortMultipartUpload"
_REGION = "set AWS_DEFAULT_REGION to the bucket's region, or AWS_ENDPOINT_URL to its server"
_OUTAGES = (EndpointConnectionError, ConnectTimeoutError, ConnectionClosedError, ReadTimeoutError)
RETRY_S = 1.0
"""When a store that is busy, or does not answer, is worth another try."""
_ANSWERS: dict[str, tuple[str, str]] = {
    "NoSuchBucket": ("there is no such bucket", "create it, or correct the name in --store s3://BUCKET/PREFIX"),
    "AccessDenied": ("access is denied", f"check the rights of these credentials: {_RIGHTS}"),
    "InvalidAccessKeyId": ("the access key is not known", _KEYS),
    "SignatureDoesNotMatch": ("the secret key does not fit the access key", _KEYS),
    "ExpiredToken": ("the credentials have expired", "renew them, and start again"),
    "InvalidToken": ("the session token is not valid", "renew AWS_SESSION_TOKEN, or unset it"),
    "PermanentRedirect": ("the bucket is in another region", _REGION),
    "AuthorizationHeaderMalformed": ("the bucket is in another region", _REGION),
    "RequestTimeTooSkewed": ("this machine's clock is wrong", "set the clock: requests are signed with the time"),
    "403": ("access is denied", f"check credentials and their rights: {_RIGHTS}"),
}
"""Sentence and hint by error code."""


def code_of(error: ClientError) -> str:
    """The code of an answer: a word, or the status in digits if it had no body."""
    return str(error.response.get("Error", {}).get("Code", ""))


def store_error(key: str, error: ClientError | BotoCoreError) -> StoreFailed:
    """The error that callers of the store get."""
    if isinstance(error, ClientError):
        code = code_of(error)
        detail = error.response.get("Error", {}).get("Message", "")
        sentence, hint = _ANSWERS.get(code, (str(detail) or "it gave no reason", ""))
        later_s = RETRY_S if code == "SlowDown" or _status_of(error) in (429, 500, 502, 503, 504) else None
        text = f"{key}: the store answered {code or 'an error'}: {sentence}"
        return StoreFailed(text, hint=hint, retry_after_s=later_s)
    sentence, hint = _unanswered(error)
    later_s = RETRY_S if isinstance(error, _OUTAGES) else None
    return StoreFailed(f"{key}: the store did not answer: {sentence}", hint=hint, retry_after_s=later_s)


def _status_of(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _unanswered(error: BotoCoreError) -> tuple[str, str]:
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return "there are no credentials for it", _KEYS
    if isinstance(error, NoRegionError):
        return "no region is set", _REGION
    if isinstance(error, SSLError):
        return f"TLS failed: {error}", "check that AWS_ENDPOINT_URL has the right scheme and a trusted certificate"
    if isinstance(error, _OUTAGES):
        url = str(getattr(error, "kwargs", {}).get("endpoint_url", ""))
        return f"{_connection(error)} ({url})", "check AWS_ENDPOINT_URL, and that the server runs"
    return str(error) or type(error).__name__, ""


def _connection(error: BotoCoreError) -> str:
    if isinstance(error, ConnectTimeoutError | ReadTimeoutError):
        return "it took too long"
    named = {type(cause).__name__ for cause in _causes(error)}
    if named & {"NameResolutionError", "gaierror"}:
        return "there is no host of this name"
    return "it refused the connection" if "ConnectionRefusedError" in named else "the connection failed"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and all that it was raised from, also where the client keeps it as an argument."""
    seen: list[BaseException] = []
    todo: list[object] = [error]
    while todo:
        one = todo.pop()
        if isinstance(one, BaseException) and one not in seen:
            seen.append(one)
            yield one
            todo += [one.__cause__, one.__context__, *getattr(one, "kwargs", {}).values(), *one.args]
            todo.append(getattr(one, "reason", None))
