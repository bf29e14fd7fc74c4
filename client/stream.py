"""Streams: the items or events of an answer, as they come; one with a key goes on after its connection broke."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, Generic, Self, TypeVar

import httpx

from fleetstart.runtime.contract.call_format import EVENTS, NO_ITEM, Bill, EventReader, decode_value, raise_for
from fleetstart.runtime.contract.sse import ServerSentEvent

from .request import CallRequest
from .resumption import Resumption
from .transport import AsyncTransport, Transport

T = TypeVar("T")


class Stream(Generic[T]):
    """Streaming answer of one call, which is sent when the first item is asked for.

    Iterating gives the items of a generator, the blocks of a body of bytes, or the one value of any other answer. Leave
    the loop, or the `with` block, and the call is cancelled; a call with an `idempotency_key` goes on instead, and its
    stream is gone on with when the connection breaks or a gateway dies.
    """

    def __init__(self, transport: Transport, call: CallRequest, returns: Any) -> None:
        self._transport = transport
        self._call = call
        self._returns = returns
        self._reader = EventReader(call.name, returns)
        self._response: httpx.Response | None = None

    @property
    def bill(self) -> Bill | None:
        """The bill, after the last item."""
        return self._reader.bill

    def __iter__(self) -> Iterator[T]:
        for item, _ in self._read():
            if item is not NO_ITEM:
                yield item

    def events(self) -> Iterator[ServerSentEvent]:
        """Iterates the events themselves, with those of progress; nothing if the answer is no stream of events."""
        for _, event in self._read():
            if event is not None:
                yield event

    def close(self) -> None:
        """Ends the call, wherever it is."""
        if self._response is not None:
            self._response.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> Iterator[tuple[Any, ServerSentEvent | None]]:
        if self._response is not None:
            raise RuntimeError(f"the stream of {self._call.name} has been read: call stream() again")
        resumption = Resumption(self._call, self._reader, self._transport.policy)
        while True:
            response = self._response = self._transport.send(resumption.request(), stream=True)
            kind = response.headers.get("content-type", "")
            try:
                if response.is_error:
                    raise_for(self._call.name, response.status_code, response.headers, response.read())
                if kind.startswith(EVENTS):
                    for block in response.iter_bytes():
                        yield from self._reader.feed(block)
                    yield from self._reader.end()
                elif _has_blocks(kind, self._returns):
                    for block in response.iter_bytes():
                        yield block, None
                else:
                    yield decode_value(self._call.name, kind, response.read(), self._returns), None
                return
            except httpx.TransportError as error:
                pause_s = resumption.after_break(error, is_stream=kind.startswith(EVENTS))
            finally:
                response.close()
            time.sleep(pause_s)


class AsyncStream(Generic[T]):
    """Streaming answer of one call, as `Stream`. Use it with `async with` where its loop may be left early."""

    def __init__(self, transport: AsyncTransport, call: CallRequest, returns: Any) -> None:
        self._transport = transport
        self._call = call
        self._returns = returns
        self._reader = EventReader(call.name, returns)
        self._response: httpx.Response | None = None

    @property
    def bill(self) -> Bill | None:
        """The bill, after the last item."""
        return self._reader.bill

    async def __aiter__(self) -> AsyncIterator[T]:
        async for item, _ in self._read():
            if item is not NO_ITEM:
                yield item

    async def events(self) -> AsyncIterator[ServerSentEvent]:
        """Iterates the events themselves, with those of progress; nothing if the answer is no stream of events."""
        async for _, event in self._read():
            if event is not None:
                yield event

    async def aclose(self) -> None:
        """Ends the call, wherever it is."""
        if self._response is not None:
            await self._response.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _read(self) -> AsyncIterator[tuple[Any, ServerSentEvent | None]]:
        if self._response is not None:
            raise RuntimeError(f"the stream of {self._call.name} has been read: call stream() again")
        resumption = Resumption(self._call, self._reader, self._transport.policy)
        while True:
            response = self._response = await self._transport.send(resumption.request(), stream=True)
            kind = response.headers.get("content-type", "")
            try:
                if response.is_error:
                    raise_for(self._call.name, response.status_code, response.headers, await response.aread())
                if kind.startswith(EVENTS):
                    async for block in response.aiter_bytes():
                        for read in self._reader.feed(block):
                            yield read
                    for read in self._reader.end():
                        yield read
                elif _has_blocks(kind, self._returns):
                    async for block in response.aiter_bytes():
                        yield block, None
                else:
                    yield decode_value(self._call.name, kind, await response.aread(), self._returns), None
                return
            except httpx.TransportError as error:
                pause_s = resumption.after_break(error, is_stream=kind.startswith(EVENTS))
            finally:
                await response.aclose()
            await asyncio.sleep(pause_s)


def _has_blocks(kind: str, returns: Any) -> bool:
    return returns is bytes or not kind.startswith(("application/json", "text/"))
