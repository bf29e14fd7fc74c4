"""Handle of one function: calls it, streams, maps, submits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Generic, Literal, TypeVar, overload

from fleetstart.runtime.contract.call_format import NOTHING

from .errors import InputFailed
from .invocation import Invocation, submitted
from .mapping import map_calls
from .request import CallOptions, async_request, call_request, stream_request
from .result import Result, result_of
from .stream import Stream
from .transport import Transport

T = TypeVar("T")


class Function(Generic[T]):
    """One function of a server. Any thread may use it.

    The input is one value (`embed.call({"text": "hello"})`, or bytes) or the handler's arguments by their names
    (`embed(text="hello")`). Calls raise the platform's errors, each a FleetError with `code` and `hint`.
    """

    def __init__(self, transport: Transport, name: str, options: CallOptions, returns: Any) -> None:
        self.name = name
        self._transport = transport
        self._options = options
        self._returns = returns

    def __call__(self, /, **arguments: Any) -> T:
        """Calls the function with these arguments, and returns its answer."""
        return self.call_with_bill(**arguments).value

    def call(self, input: Any = NOTHING, /, **arguments: Any) -> T:
        """Calls the function, and returns its answer: JSON decoded, text, or bytes; of a stream, the list of its items.

        It is sent with an `Idempotency-Key`, so that it is run once, however often a lost connection is made again.
        """
        return self.call_with_bill(input, **arguments).value

    def call_with_bill(self, input: Any = NOTHING, /, **arguments: Any) -> Result[T]:
        """As `call`, with the bill, the phases and the version that answered."""
        return self._called(self._options, input, arguments)

    def stream(self, input: Any = NOTHING, /, **arguments: Any) -> Stream[T]:
        """Calls the function, and iterates its answer as it comes. Leaving the loop cancels the call."""
        call = stream_request(self.name, self._options, input, arguments)
        return Stream(self._transport, call, self._returns)

    @overload
    def map(self, inputs: Iterable[Any], *, concurrency: int = 8) -> Iterator[T]: ...

    @overload
    def map(
        self, inputs: Iterable[Any], *, concurrency: int = 8, return_exceptions: Literal[True]
    ) -> Iterator[T | InputFailed]: ...

    def map(
        self, inputs: Iterable[Any], *, concurrency: int = 8, return_exceptions: bool = False
    ) -> Iterator[T] | Iterator[T | InputFailed]:
        """Calls the function for each input, so many at a time, and yields the answers in the order of the inputs.

        The inputs are read as they are needed. The first call that fails raises InputFailed, with `index` and `input`,
        when those that run have ended; `return_exceptions` yields it instead. With an `idempotency_key`, input 3 has
        the key `KEY-3`: a map that is run again gets the stored answers of what was done.
        """

        def call(index: int, input: Any) -> T:
            return self._called(keyed(self._options, index), input, {}).value

        return map_calls(call, inputs, concurrency=concurrency, return_exceptions=return_exceptions)

    def submit(self, input: Any = NOTHING, /, **arguments: Any) -> Invocation[T]:
        """Submits an async invocation, which runs whether or not this process lives on."""
        response = self._transport.send(async_request(self.name, self._options, input, arguments))
        return Invocation(self._transport, submitted(response).id, self.name, self._returns)

    def with_options(
        self,
        *,
        timeout_s: float | None = None,
        path: str | None = None,
        method: str | None = None,
        headers: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
        webhook: str | None = None,
    ) -> Function[T]:
        """A handle with other options: see `Client.function`. `webhook` is for `submit`."""
        options = changed(
            self._options, timeout_s=timeout_s, path=path, method=method, headers=headers,
            idempotency_key=idempotency_key, webhook=webhook,
        )  # fmt: skip
        return Function(self._transport, self.name, options, self._returns)

    def _called(self, options: CallOptions, input: Any, arguments: Mapping[str, Any]) -> Result[T]:
        response = self._transport.send(call_request(self.name, options, input, arguments))
        return result_of(self.name, response.status_code, response.headers, response.content, self._returns)

    def __repr__(self) -> str:
        return f"<Function {self.name}>"


def changed(options: CallOptions, **changes: Any) -> CallOptions:
    """Options with those changes that are given."""
    return replace(options, **{name: value for name, value in changes.items() if value is not None})


def keyed(options: CallOptions, index: int) -> CallOptions:
    """Options of one input of a map."""
    key = options.idempotency_key
    return replace(options, idempotency_key=f"{key}-{index}") if key else options
