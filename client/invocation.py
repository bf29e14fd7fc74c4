"""Handles of async invocations: look at one, wait for its result, cancel it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from fleetstart.runtime.contract.call_format import decode_error
from fleetstart.runtime.contract.errors import DeadlineExceeded

from .request import CallRequest
from .result import Result, result_of
from .transport import AsyncTransport, Transport

T = TypeVar("T")
POLL_S = 20.0
"""How long one request waits for the end."""
REQUEST_S = 30.0
ENDED = frozenset(("succeeded", "failed", "cancelled", "expired"))


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress that a handler reported last."""

    fraction: float
    message: str = ""


class InvocationStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of an async invocation."""

    id: str
    function: str
    status: str
    """`queued`, `running`, `succeeded`, `failed`, `cancelled` or `expired`."""
    runs: int = 1
    progress: Progress | None = None
    cancelling: bool = False
    dead_letter: bool = False

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


class Invocation(Generic[T]):
    """One async invocation. Its id finds it again, from any process: `client.invocation(id)`."""

    def __init__(self, transport: Transport, id: str, name: str, returns: Any) -> None:
        self.id = id
        self._transport = transport
        self._requests = _Requests(id, name, returns)

    def status(self) -> InvocationStatus:
        """Its state now. Errors: NotFound if it is not kept any more."""
        return self._requests.status(self._transport.send(self._requests.wait(0)))

    def result(self, timeout_s: float | None = None) -> T:
        """Waits for the end and returns the answer.

        Errors: what a call raises, `not_answered` if it was cancelled, DeadlineExceeded after `timeout_s` (it goes on).
        """
        return self.result_with_bill(timeout_s).value

    def result_with_bill(self, timeout_s: float | None = None) -> Result[T]:
        """As `result`, with bill and timing."""
        left_s = _clock(timeout_s)
        while not self._requests.status(self._transport.send(self._requests.wait(left_s()))).has_ended:
            self._requests.check(left_s(), timeout_s)
        return self._requests.result(self._transport.send(self._requests.of_result()))

    def cancel(self) -> InvocationStatus:
        """Cancels it; a running one ends a moment later. One that has ended stays as it is."""
        return self._requests.status(self._transport.send(self._requests.cancel()))

    def __repr__(self) -> str:
        return f"<Invocation {self.id}>"


class AsyncInvocation(Generic[T]):
    """One async invocation, as `Invocation`."""

    def __init__(self, transport: AsyncTransport, id: str, name: str, returns: Any) -> None:
        self.id = id
        self._transport = transport
        self._requests = _Requests(id, name, returns)

    async def status(self) -> InvocationStatus:
        """Its state now. Errors: NotFound if it is not kept any more."""
        return self._requests.status(await self._transport.send(self._requests.wait(0)))

    async def result(self, timeout_s: float | None = None) -> T:
        """Waits for the end and returns the answer. Errors: as `Invocation.result`."""
        return (await self.result_with_bill(timeout_s)).value

    async def result_with_bill(self, timeout_s: float | None = None) -> Result[T]:
        """As `result`, with bill and timing."""
        left_s = _clock(timeout_s)
        while not self._requests.status(await self._transport.send(self._requests.wait(left_s()))).has_ended:
            self._requests.check(left_s(), timeout_s)
        return self._requests.result(await self._transport.send(self._requests.of_result()))

    async def cancel(self) -> InvocationStatus:
        """Cancels it; a running one ends a moment later. One that has ended stays as it is."""
        return self._requests.status(await self._transport.send(self._requests.cancel()))

    def __repr__(self) -> str:
        return f"<AsyncInvocation {self.id}>"


_STATUS = msgspec.json.Decoder(InvocationStatus)
"""Made once, at import: msgspec crashes where two threads are the first to decode a type."""


def submitted(response: httpx.Response) -> InvocationStatus:
    """State of an invocation that was just accepted. Errors: the platform's."""
    if response.status_code not in (200, 202) or response.is_error:
        raise decode_error(response.status_code, response.content)
    return _STATUS.decode(response.content)


class _Requests:
    """Requests about one invocation, and how their answers are read."""

    def __init__(self, id: str, name: str, returns: Any) -> None:
        self._id = id
        self._name = name or f"of {id}"
        self._returns = returns

    def wait(self, seconds: float) -> CallRequest:
        return self._about("GET", "", {"prefer": f"wait={round(min(POLL_S, seconds))}"})

    def of_result(self) -> CallRequest:
        return self._about("GET", "/result", {})

    def cancel(self) -> CallRequest:
        return self._about("DELETE", "", {})

    def status(self, response: httpx.Response) -> InvocationStatus:
        return submitted(response)

    def result(self, response: httpx.Response) -> Result[Any]:
        return result_of(self._name, response.status_code, response.headers, response.content, self._returns)

    def check(self, left_s: float, timeout_s: float | None) -> None:
        if left_s <= 0:
            raise DeadlineExceeded(
                f"invocation {self._id} has not ended after {timeout_s:g} s",
                hint="it goes on: ask again with result(), or cancel() it",
            )

    def _about(self, method: str, below: str, headers: Mapping[str, str]) -> CallRequest:
        return CallRequest(
            name=f"invocation {self._id}", method=method, content=None, headers=headers, repeatable=True,
            target=f"/api/v1/invocations/{quote(self._id, safe='')}{below}", timeout_s=POLL_S + REQUEST_S,
        )  # fmt: skip


def _clock(timeout_s: float | None) -> Callable[[], float]:
    """Tells the seconds that are left."""
    ends_s = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
    return lambda: max(0.0, ends_s - time.monotonic())
