"""A client of the simulated Redis, with the methods of `redis.asyncio.Redis` that the product calls.

Requests and answers take time, and go astray as the network says: a request may be lost, and an answer to one that was
done. A client may try again by itself, as redis-py does: then what was done is done twice.
"""

from __future__ import annotations

import asyncio
import builtins
from collections import deque
from collections.abc import Iterable, Sequence
from contextvars import Context, copy_context
from functools import partial
from typing import Any

from redis.exceptions import ConnectionError, TimeoutError

from tests.simulation.loop import Handle, SimulatedLoop
from tests.simulation.network import Network
from tests.simulation.processes import CURRENT, Process
from tests.simulation.store.commands import Commands, Convert, as_is, command_of, encoded
from tests.simulation.store.server import Command, Server


class Client(Commands):
    """The connections of one process."""

    def __init__(
        self, loop: SimulatedLoop, server: Server, network: Network, process: Process, *, retries: int, timeout_s: float
    ) -> None:
        self._loop = loop
        self._server = server
        self._network = network
        self.process = process
        self._retries = retries
        self._timeout_s = timeout_s
        context = copy_context()
        context.run(CURRENT.set, server.process)
        self._there: Context = context
        context = copy_context()
        context.run(CURRENT.set, process)
        self._here: Context = context

    def _do(self, command: list[Any], convert: Convert = as_is) -> Any:
        return self._one(command_of(command), convert)

    async def _one(self, command: Command, convert: Convert) -> Any:
        (answer,) = await self.ask((command,))
        if isinstance(answer, Exception):
            raise answer
        return answer if convert is as_is else convert(answer)

    async def ask(self, commands: Sequence[Command]) -> list[Any]:
        """Errors: ConnectionError, TimeoutError; whether the commands were done is not known then."""
        loop = self._loop
        for left in range(self._retries, -1, -1):
            answered: asyncio.Future[list[Any]] = asyncio.Future(loop=loop)
            reaches, back, error, count = self._network.request(self.process, len(commands))
            if reaches is not None:
                done = commands if count is None else commands[:count]
                loop.arrive(reaches, self._server.process, self._there, self._serve, done, answered, back, loop.now_ns)
            if error is not None:
                lost = ConnectionError("Connection reset by peer")
                loop.arrive(error, self.process, self._here, _fail, answered, lost)
            timer: Handle | None = None
            in_time = reaches is not None and back is not None and reaches + back < self._timeout_s
            if in_time and not self._server.process.stopped:
                self._server.unanswered[answered] = partial(self._late, answered, loop.now_ns)
            else:
                timer = self._timer(answered, self._timeout_s)
            try:
                return await answered
            except (ConnectionError, TimeoutError):
                if not left:
                    raise
            finally:
                if timer is not None:
                    timer.cancel()
        raise AssertionError("unreachable")

    def _timer(self, answered: asyncio.Future[list[Any]], after_s: float) -> Handle:
        return self._loop.call_later(after_s, _time_out, answered, self._timeout_s, context=self._here)

    def _late(self, answered: asyncio.Future[list[Any]], asked_ns: int) -> None:
        self._timer(answered, self._timeout_s - (self._loop.now_ns - asked_ns) / 1e9)

    def _serve(
        self, commands: Sequence[Command], answered: asyncio.Future[list[Any]], back_s: float | None, asked_ns: int
    ) -> None:
        self._server.unanswered.pop(answered, None)
        answers = self._server.answer(commands)
        self._network.on_served(self.process, commands, answers, back_s is None, asked_ns)
        if back_s is not None:
            self._loop.arrive(back_s, self.process, self._here, _settle, answered, answers)

    def pipeline(self, transaction: bool = True) -> Pipeline:
        return Pipeline(self)

    def pubsub(self, ignore_subscribe_messages: bool = False) -> PubSub:
        return PubSub(self, self._loop, self._server, self._network, quiet=ignore_subscribe_messages)

    async def aclose(self) -> None:
        """There is nothing to close."""


def _settle(answered: asyncio.Future[list[Any]], answers: list[Any]) -> None:
    if not answered.done():
        answered.set_result(answers)


def _fail(answered: asyncio.Future[list[Any]], error: Exception) -> None:
    if not answered.done():
        answered.set_exception(error)


def _time_out(answered: asyncio.Future[list[Any]], timeout_s: float) -> None:
    _fail(answered, TimeoutError(f"Timeout reading, after {timeout_s:g} s"))


class Pipeline(Commands):
    def __init__(self, client: Client) -> None:
        self._client = client
        self._commands: list[Command] = []
        self._converts: list[Convert] = []

    async def __aenter__(self) -> Pipeline:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._commands.clear()

    def _do(self, command: list[Any], convert: Convert = as_is) -> Any:
        self._commands.append(command_of(command))
        self._converts.append(convert)
        return self

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        commands, converts = self._commands, self._converts
        self._commands, self._converts = [], []
        if not commands:
            return []
        answers = await self._client.ask(commands)
        for answer in answers if raise_on_error else ():
            if isinstance(answer, Exception):
                raise answer
        return [
            answer if convert is as_is or isinstance(answer, Exception) else convert(answer)
            for answer, convert in zip(answers, converts, strict=True)
        ]


class PubSub:
    """A subscribed connection. Publications come late, twice, in another order or not at all, as the network says."""

    def __init__(self, client: Client, loop: SimulatedLoop, server: Server, network: Network, *, quiet: bool) -> None:
        self._client = client
        self.process = client.process
        self._loop = loop
        self._server = server
        self._network = network
        self._quiet = quiet
        self.channels: set[bytes] = set()
        self.patterns: list[bytes] = []
        self._messages: deque[dict[str, Any]] = deque()
        self._arrived = asyncio.Event()
        self._broken = False

    async def subscribe(self, *channels: str) -> None:
        await self._client.ask([(b"EXISTS", b"subscribe")])
        self.channels.update(map(encoded, channels))
        self._begin(channels, "subscribe")

    async def psubscribe(self, *patterns: str) -> None:
        await self._client.ask([(b"EXISTS", b"subscribe")])
        self.patterns += map(encoded, patterns)
        self._begin(patterns, "psubscribe")

    def _begin(self, names: Iterable[str], kind: str) -> None:
        if self not in self._server.subscribers:
            self._server.subscribers.append(self)
        for name in names if not self._quiet else ():
            self._arrive({"type": kind, "pattern": None, "channel": name.encode(), "data": 1})

    def publication(self, pattern: bytes | None, channel: bytes, data: bytes) -> None:
        message = {
            "type": "message" if pattern is None else "pmessage", "pattern": pattern, "channel": channel, "data": data
        }  # fmt: skip
        for delay_s in self._network.publication(self._client.process):
            self._loop.arrive(delay_s, self.process, self._client._here, self._arrive, message)

    def broken(self) -> None:
        self._broken = True
        self._loop.call_soon(self._arrived.set, context=self._client._here)
        if self in self._server.subscribers:
            self._server.subscribers.remove(self)

    def _arrive(self, message: dict[str, Any]) -> None:
        self._messages.append(message)
        self._arrived.set()

    async def get_message(self, timeout: float | None = 0.0) -> dict[str, Any] | None:
        try:
            async with asyncio.timeout(timeout):
                while not self._messages:
                    if self._broken:
                        raise ConnectionError("Connection closed by server.")
                    self._arrived.clear()
                    await self._arrived.wait()
        except builtins.TimeoutError:
            return None
        return self._messages.popleft()

    async def aclose(self) -> None:
        if self in self._server.subscribers:
            self._server.subscribers.remove(self)
