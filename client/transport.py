"""Connections to one server: send a request, and send it again where that cannot run anything twice."""

from __future__ import annotations

import asyncio
import os
import random
import ssl
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from fleetstart.runtime.contract.call_format import redirect_of
from fleetstart.runtime.contract.errors import DeadlineExceeded, FleetError, WorkerLost

from .address import Address
from .errors import Unreachable
from .request import CallRequest
from .retry import RetryPolicy, retry_after_s

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
CONNECT_S = 5.0
GRACE_S = 2.0
"""How much longer than a call's time its client waits: the server's own error says more than "no answer"."""
BROKEN = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError, httpx.CloseError)
"""Errors of a connection that broke: the server may have begun the call."""
NOT_MADE = (httpx.ConnectError, httpx.ConnectTimeout)
"""Errors of a connection that was not made: nothing was sent."""


class Attempts:
    """State of one call over its tries: decides for both transports what follows a failure."""

    def __init__(self, url: str, call: CallRequest, policy: RetryPolicy) -> None:
        self._url = url
        self._call = call
        self._policy = policy
        self._done = 0
        self._ends_s = time.monotonic() + call.timeout_s

    @property
    def left_s(self) -> float:
        return max(0.001, self._ends_s - time.monotonic())

    def headers(self) -> dict[str, str]:
        """Headers of the next try: the call's, and the time that is left."""
        own = {"fs-timeout-s": f"{self.left_s:.3f}"} if self._call.limits_run else {}
        return {**own, **self._call.headers}

    def timeout(self) -> httpx.Timeout:
        return httpx.Timeout(self.left_s + GRACE_S, connect=min(CONNECT_S, self.left_s), pool=None)

    def after_rejection(self, status: int, headers: Mapping[str, str]) -> float | None:
        """Seconds until the next try after this response; None if it is the answer."""
        asked_s = retry_after_s(status, headers)
        return None if asked_s is None else self._pause_s(asked_s)

    def after_error(self, error: httpx.TransportError, *, was_reached: bool) -> float:
        """Seconds until the next try after this failure. Errors: Unreachable, DeadlineExceeded if there is none.

        A connection that is refused is tried again only if one was made before: else the URL is wrong.
        """
        pause_s = None
        if (isinstance(error, BROKEN) and self._call.repeatable) or (isinstance(error, NOT_MADE) and was_reached):
            pause_s = self._pause_s(0.0)
        if pause_s is None:
            raise connection_error(error, self._url, self._call.name, self._call.timeout_s) from error
        return pause_s

    def _pause_s(self, asked_s: float) -> float | None:
        pause_s = self._policy.pause_s(self._done, asked_s=asked_s, left_s=self.left_s, jitter=random.random())
        self._done += 1
        return pause_s


def connection_error(error: httpx.TransportError, url: str, name: str, timeout_s: float) -> FleetError:
    if isinstance(error, httpx.ReadTimeout):
        return DeadlineExceeded(
            f"{name} has not answered within {timeout_s:g} s", hint="give it longer with timeout_s, or submit() it"
        )
    return Unreachable(
        f"{url} does not answer: {str(error) or type(error).__name__}",
        hint="is it running? `fs up` starts a server on this machine, `fs doctor` checks this machine",
    )


def broken_off(error: httpx.TransportError, name: str) -> FleetError:
    """The error of a stream that has begun: it is not sent again."""
    if isinstance(error, httpx.ReadTimeout):
        return DeadlineExceeded(f"{name} has sent nothing within its time", hint="give it longer with timeout_s")
    return WorkerLost(f"the answer of {name} broke off", hint="call again; `fs logs` may say why")


def not_redirected(url: str, response: httpx.Response) -> None:
    """Errors: Unreachable, if what answers is not the platform and names another server."""
    if elsewhere := redirect_of(response.status_code, response.headers):
        raise Unreachable(f"{url} sends its callers to {elsewhere}", hint="use that URL, with FS_URL or Client(url)")


class Transport:
    """Connections of a Client. Any thread may use it. A process that has it by a fork, or by pickle, makes its own."""

    def __init__(self, address: Address, policy: RetryPolicy) -> None:
        self._address = address
        self._url = address.url
        self.policy = policy
        self._reached = False
        self._process = os.getpid()
        self._http = httpx.Client(**_settings(address))

    def __reduce__(self) -> tuple[Any, ...]:
        return Transport, (self._address, self.policy)

    @property
    def http(self) -> httpx.Client:
        """The connections of this process: of two on one connection, each would get answers of the other."""
        if self._process != os.getpid():
            self._http, self._process = httpx.Client(**_settings(self._address)), os.getpid()
        return self._http

    def send(self, call: CallRequest, *, stream: bool = False) -> httpx.Response:
        """Sends a call until there is an answer. Errors: Unreachable, DeadlineExceeded."""
        attempts = Attempts(self._url, call, self.policy)
        while True:
            request = self.http.build_request(
                call.method, call.target, content=call.content, headers=attempts.headers(), timeout=attempts.timeout()
            )
            try:
                response = self.http.send(request, stream=stream)
                not_redirected(self._url, response)
            except httpx.TransportError as error:
                time.sleep(attempts.after_error(error, was_reached=self._reached))
                continue
            self._reached = True
            pause_s = attempts.after_rejection(response.status_code, response.headers)
            if pause_s is None:
                return response
            response.close()
            time.sleep(pause_s)


class AsyncTransport:
    """Connections of an AsyncClient, for one event loop."""

    def __init__(self, address: Address, policy: RetryPolicy) -> None:
        self._url = address.url
        self.policy = policy
        self._reached = False
        self.http = httpx.AsyncClient(**_settings(address))

    async def send(self, call: CallRequest, *, stream: bool = False) -> httpx.Response:
        """Sends a call until there is an answer. Errors: Unreachable, DeadlineExceeded."""
        attempts = Attempts(self._url, call, self.policy)
        while True:
            request = self.http.build_request(
                call.method, call.target, content=call.content, headers=attempts.headers(), timeout=attempts.timeout()
            )
            try:
                response = await self.http.send(request, stream=stream)
                not_redirected(self._url, response)
            except httpx.TransportError as error:
                await asyncio.sleep(attempts.after_error(error, was_reached=self._reached))
                continue
            self._reached = True
            pause_s = attempts.after_rejection(response.status_code, response.headers)
            if pause_s is None:
                return response
            await response.aclose()
            await asyncio.sleep(pause_s)


def _settings(address: Address) -> dict[str, Any]:
    parts = urlsplit(address.url)
    return {
        "base_url": address.url,
        "headers": {"authorization": f"Bearer {address.key}"} if address.key else {},
        # No limit of idle ones, either: a pool that closes some beyond a number may close one that a thread has just
        # taken, whose call then ends with "Bad file descriptor" (httpcore 1.0).
        "limits": httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=30.0),
        # A proxy of the environment is for the world outside, never for this machine.
        "trust_env": parts.hostname not in LOOPBACK,
        # Without TLS nobody's certificate is read, and to load those of the world takes longer than the call.
        "verify": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if parts.scheme == "http" else True,
    }
