"""Clients of one server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, TypeVar, overload

from .address import find_address
from .async_function import AsyncFunction
from .function import Function
from .invocation import AsyncInvocation, Invocation
from .request import CallOptions
from .retry import RETRIES, RetryPolicy
from .transport import AsyncTransport, Transport

T = TypeVar("T")
TIMEOUT_S = 300.0
"""Time of a call with its retries, as long as that of a function without `timeout_s`."""


class Client:
    """Client of one server. Any thread may use it; `close()`, or a `with` block, closes its connections.

    Args:
        url: The server. Default: `FS_URL`, then the server that `fs up` started in `FS_HOME`.
        key: The API key. Default: `FS_KEY`, then the key in `FS_HOME` for the server of that home.
        timeout_s: Time of a call with its retries.
        retries: How often a call is sent again after a lost connection, or a 429 or 503 of the platform with
            `Retry-After`. 0 for never.

    Raises:
        Unreachable: if no server is named and none runs here.
    """

    def __init__(
        self, url: str | None = None, key: str | None = None, *, timeout_s: float = TIMEOUT_S, retries: int = RETRIES
    ) -> None:
        address = find_address(url, key)
        self.url = address.url
        self._timeout_s = timeout_s
        self._transport = Transport(address, RetryPolicy(retries=retries))

    @overload
    def function(
        self,
        name: str,
        *,
        timeout_s: float | None = None,
        path: str = "",
        method: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> Function[Any]: ...

    @overload
    def function(
        self,
        name: str,
        *,
        returns: type[T],
        timeout_s: float | None = None,
        path: str = "",
        method: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> Function[T]: ...

    def function(
        self,
        name: str,
        *,
        returns: Any = Any,
        timeout_s: float | None = None,
        path: str = "",
        method: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> Function[Any]:
        """Handle of a function: `chat`, `chat@3` for a version, `chat@prod` for an alias. It sends nothing.

        Args:
            name: The function.
            returns: Type that answers, or items of a stream, are decoded to and checked against: `list[float]`, a
                dataclass, a TypedDict, `bytes` for the body as it is.
            timeout_s: Time of a call with its retries. Default: the client's.
            path: Path below the function's URL, such as `/v1/embeddings`.
            method: HTTP method. Default: POST with an input or without a path, GET otherwise.
            headers: More headers.
        """
        return Function(self._transport, name, _options(self._timeout_s, timeout_s, path, method, headers), returns)

    def invocation(self, id: str) -> Invocation[Any]:
        """Handle of an async invocation that was submitted before, by this process or another one."""
        return Invocation(self._transport, id, "", Any)

    def close(self) -> None:
        """Closes the connections."""
        self._transport.http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Client of {self.url}>"


class AsyncClient:
    """Client of one server for asyncio, with the arguments of `Client`. `aclose()`, or `async with`, closes its
    connections. It belongs to one event loop."""

    def __init__(
        self, url: str | None = None, key: str | None = None, *, timeout_s: float = TIMEOUT_S, retries: int = RETRIES
    ) -> None:
        address = find_address(url, key)
        self.url = address.url
        self._timeout_s = timeout_s
        self._transport = AsyncTransport(address, RetryPolicy(retries=retries))

    @overload
    def function(
        self,
        name: str,
        *,
        timeout_s: float | None = None,
        path: str = "",
        method: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> AsyncFunction[Any]: ...

    @overload
    def function(
        self,
        name: str,
        *,
        returns: type[T],
        timeout_s: float | None = None,
        path: str = "",
        method: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> AsyncFunction[T]: ...

    def function(
        self,
        name: str,
        *,
        returns: Any = Any,
        timeout_s: float | None = None,
        path: str = "",
        method: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> AsyncFunction[Any]:
        """Handle of a function, as `Client.function`."""
        options = _options(self._timeout_s, timeout_s, path, method, headers)
        return AsyncFunction(self._transport, name, options, returns)

    def invocation(self, id: str) -> AsyncInvocation[Any]:
        """Handle of an async invocation that was submitted before, by this process or another one."""
        return AsyncInvocation(self._transport, id, "", Any)

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._transport.http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<AsyncClient of {self.url}>"


def _options(
    default_s: float, timeout_s: float | None, path: str, method: str, headers: Mapping[str, str] | None
) -> CallOptions:
    time_s = default_s if timeout_s is None else timeout_s
    return CallOptions(timeout_s=time_s, path=path, method=method, headers=dict(headers or {}))
