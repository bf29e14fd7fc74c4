"""One request to a worker over HTTP, and the ways in which it can come to nothing."""

from __future__ import annotations

import io
import time

import aiohttp
from yarl import URL

from fleetstart.runtime.contract.worker_headers import (
    ATTEMPT_HEADER,
    CONTINUE_HEADER,
    DEADLINE_HEADER,
    REQUEST_HEADER,
    TOKEN_HEADER,
)

from .backend import Call, Worker

LARGE_BODY_BYTES = 1 << 20
"""Bodies beyond are written in pieces, so that other calls get their turn meanwhile."""


class UpstreamDisconnected(Exception):
    """The connection ended without an answer, or amid a stream that can go on elsewhere; the worker had the call."""


class UpstreamUnreachable(Exception):
    """No connection could be made: the worker never saw the call."""


class UpstreamBusy(Exception):
    """The worker ran nothing: it is full, or draining."""


async def request(session: aiohttp.ClientSession, call: Call, worker: Worker) -> aiohttp.ClientResponse:
    """Until the head of its answer has come. Errors: UpstreamUnreachable, UpstreamDisconnected."""
    left_ms = max(0, call.deadline_ns - time.monotonic_ns()) // 1_000_000
    carried = call.marks.carry() if call.marks is not None else b""
    headers = [
        *call.headers,
        (TOKEN_HEADER, worker.status.token),
        (REQUEST_HEADER, call.id),
        (DEADLINE_HEADER, str(left_ms)),
        (ATTEMPT_HEADER, str(call.attempts)),
        (CONTINUE_HEADER, str(len(carried))),
    ]
    content = call.body + carried
    body: bytes | io.BytesIO | None = content or None
    if len(content) > LARGE_BODY_BYTES:
        body = io.BytesIO(content)
    url = URL(f"http://{worker.status.endpoint}{call.target}", encoded=True)
    try:
        return await session.request(call.method, url, headers=headers, data=body, allow_redirects=False)
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise UpstreamUnreachable from error
    except (aiohttp.ClientError, ConnectionError) as error:
        raise UpstreamDisconnected from error


async def read(response: aiohttp.ClientResponse) -> bytes:
    """Errors: UpstreamDisconnected."""
    try:
        return await response.read()
    except (aiohttp.ClientError, ConnectionError) as error:
        raise UpstreamDisconnected from error
