"""Handle of one function for asyncio: calls it, streams, maps, submits."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from typing import Any, Generic, Literal, TypeVar, overload

from fleetstart.runtime.contract.call_format import NOTHING

from .errors import InputFailed
from .function import changed, keyed
from .invocation import AsyncInvocation, submitted
from .mapping import map_calls_async
from .request import CallOptions, async_request, call_request, stream_request
from .result import Result, result_of
from .stream import AsyncStream
from .transport import AsyncTransport

T = TypeVar("T")


class AsyncFunction(Generic[T]):
    """One function of a server, as `Function`, with coroutines."""

    def __init__(self, transport: AsyncTransport, name: str, options: CallOptions, returns: Any) -> None:
        self.name = name
        self._transport = transport
        self._options = options
        self._returns = returns

    async def __call__(self, /, **arguments: Any) -> T:
        """Calls the function with these arguments, and returns its answer."""
        return (await self.call_with_bill(**arguments)).value

    async def call(self, input: Any = NOTHING, /, **arguments: Any) -> T:
        """Calls the function, and returns its answer, as `Function.call`.

        If the task is cancelled, the call goes on at the server: a stream ends there too.
        """
        return (await self.call_with_bill(input, **arguments)).value

    async def call_with_bill(self, input: Any = NOTHING, /, **arguments: Any) -> Result[T]:
        """As `call`, with the bill, the phases and the version that answered."""
        return await self._called(self._options, input, arguments)

    def stream(self, input: Any = NOTHING, /, **arguments: Any) -> AsyncStream[T]:
        """Calls the function, and iterates its answer as it comes."""
        call = stream_request(self.name, self._options, input, arguments)
        return AsyncStream(self._transport, call, self._returns)

    @overload
    def map(self, inputs: Iterable[Any] | AsyncIterable[Any], *, concurrency: int = 8) -> AsyncIterator[T]: ...

    @overload
    def map(
        self, inputs: Iterable[Any] | AsyncIterable[Any], *, concurrency: int = 8, return_exceptions: Literal[True]
    ) -> AsyncIterator[T | InputFailed]: ...

    def map(
        self, inputs: Iterable[Any] | AsyncIterable[Any], *, concurrency: int = 8, return_exceptions: bool = False
    ) -> AsyncIterator[T] | AsyncIterator[T | InputFailed]:
        """Calls the function for each input, so many at a time, as `Function.map`."""

        async def call(index: int, input: Any) -> T:
            return (await self._called(keyed(self._options, index), input, {})).value

        return map_calls_async(call, inputs, concurrency=concurrency, return_exceptions=return_exceptions)

    async def submit(self, input: Any = NOTHING, /, **arguments: Any) -> AsyncInvocation[T]:
        """Submits an async invocation, which runs whether or not this process lives on."""
        response = await self._transport.send(async_request(self.name, self._options, input, arguments))
        return AsyncInvocation(self._transport, submitted(response).id, self.name, self._returns)

    def with_options(
        self,
        *,
        timeout_s: float | None = None,
        path: str | None = None,
        method: str | None = None,
        headers: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
        webhook: str | None = None,
    ) -> AsyncFunction[T]:
        """A handle with other options: see `Client.function`. `webhook` is for `submit`."""
        options = changed(
            self._options, timeout_s=timeout_s, path=path, method=method, headers=headers,
            idempotency_key=idempotency_key, webhook=webhook,
        )  # fmt: skip
        return AsyncFunction(self._transport, self.name, options, self._returns)

    async def _called(self, options: CallOptions, input: Any, arguments: Mapping[str, Any]) -> Result[T]:
        response = await self._transport.send(call_request(self.name, options, input, arguments))
        return result_of(self.name, response.status_code, response.headers, response.content, self._returns)

    def __repr__(self) -> str:
        return f"<AsyncFunction {self.name}>"
