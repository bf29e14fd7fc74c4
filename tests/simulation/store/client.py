"""A client of the simulated Redis, with the methods of `redis.asyncio.Redis` that the product calls.

Requests and answers take time, and go astray as the network says: a request may be lost, and an answer to one that was
done. A client may try again by itself, as redis-py does: then what was done is done twice.
"""

from __future__ import annotations

import asyncio
import builtins
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import Context, copy_context
from functools import partial
from typing import Any

from redis.exceptions import ConnectionError, TimeoutError

from tests.simulation.loop import Handle, SimulatedLoop
from tests.simulation.network import Network
from tests.simulation.processes import CURRENT, Process
from tests.simulation.store.server import Command, Server

Convert = Callable[[Any], Any]


def encoded(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, int) and not isinstance(value, bool):
        return b"%d" % value
    if isinstance(value, float):
        return repr(value).encode()
    raise TypeError(f"redis-py takes no {type(value).__name__}: {value!r}")


def command_of(words: Sequence[Any]) -> Command:
    """The bytes that are sent. Most words are bytes or text: a call for each would cost more than encoding it."""
    return tuple(
        [
            word
            if (kind := type(word)) is bytes
            else word.encode()
            if kind is str
            else b"%d" % word
            if kind is int
            else encoded(word)
            for word in words
        ]
    )


def _same(answer: Any) -> Any:
    return answer


def _mapping(answer: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(answer[::2], answer[1::2], strict=True))


def _scored(answer: list[bytes]) -> list[tuple[bytes, float]]:
    return [(member, float(score)) for member, score in zip(answer[::2], answer[1::2], strict=True)]


def _entries(answer: list[Any]) -> list[tuple[bytes, dict[bytes, bytes]]]:
    return [(entry, _mapping(fields)) for entry, fields in answer]


class Commands:
    """redis-py's methods as commands. `_do` sends one: a client answers it, a pipeline collects it."""

    def _do(self, command: list[Any], convert: Convert = _same) -> Any:
        raise NotImplementedError

    def get(self, key: str) -> Any:
        return self._do(["GET", key])

    def set(
        self,
        key: str,
        value: Any,
        *,
        ex: int | None = None,
        px: int | None = None,
        nx: bool = False,
        xx: bool = False,
        keepttl: bool = False,
    ) -> Any:
        options: list[Any] = ["EX", ex] if ex is not None else ["PX", px] if px is not None else []
        flags = [name for name, wanted in (("KEEPTTL", keepttl), ("NX", nx), ("XX", xx)) if wanted]
        return self._do(["SET", key, value, *options, *flags], lambda answer: True if answer == b"OK" else answer)

    def incrby(self, key: str, amount: int) -> Any:
        return self._do(["INCRBY", key, amount])

    def delete(self, *names: str) -> Any:
        return self._do(["DEL", *names])

    def exists(self, *names: str) -> Any:
        return self._do(["EXISTS", *names])

    def expire(self, key: str, seconds: int) -> Any:
        return self._do(["EXPIRE", key, seconds], bool)

    def pttl(self, key: str) -> Any:
        return self._do(["PTTL", key])

    def publish(self, channel: str, data: Any) -> Any:
        return self._do(["PUBLISH", channel, data])

    def time(self) -> Any:
        return self._do(["TIME"], lambda answer: (int(answer[0]), int(answer[1])))

    def info(self, section: str = "") -> Any:
        return self._do(["INFO", section])

    def script_load(self, text: str) -> Any:
        return self._do(["SCRIPT LOAD", text], lambda answer: answer.decode())

    def evalsha(self, sha: str, count: int, *args: Any) -> Any:
        return self._do(["EVALSHA", sha, count, *args])

    def eval(self, text: str, count: int, *args: Any) -> Any:
        return self._do(["EVAL", text, count, *args])

    def execute_command(self, *command: Any) -> Any:
        return self._do(list(command))

    def hget(self, key: str, field: str) -> Any:
        return self._do(["HGET", key, field])

    def hmget(self, key: str, fields: Sequence[str]) -> Any:
        return self._do(["HMGET", key, *fields])

    def hgetall(self, key: str) -> Any:
        return self._do(["HGETALL", key], _mapping)

    def hkeys(self, key: str) -> Any:
        return self._do(["HKEYS", key])

    def hvals(self, key: str) -> Any:
        return self._do(["HVALS", key])

    def hlen(self, key: str) -> Any:
        return self._do(["HLEN", key])

    def hset(self, key: str, field: Any = None, value: Any = None, mapping: Mapping[Any, Any] | None = None) -> Any:
        pairs = [] if field is None else [field, value]
        for name, content in (mapping or {}).items():
            pairs += [name, content]
        return self._do(["HSET", key, *pairs])

    def hsetnx(self, key: str, field: str, value: Any) -> Any:
        return self._do(["HSETNX", key, field, value], bool)

    def hdel(self, key: str, *fields: str) -> Any:
        return self._do(["HDEL", key, *fields])

    def hincrby(self, key: str, field: str, amount: int) -> Any:
        return self._do(["HINCRBY", key, field, amount])

    def hscan(self, key: str, cursor: int = 0, count: int = 10) -> Any:
        return self._do(["HSCAN", key, cursor, "COUNT", count], lambda answer: (int(answer[0]), _mapping(answer[1])))

    def sadd(self, key: str, *members: Any) -> Any:
        return self._do(["SADD", key, *members])

    def srem(self, key: str, *members: Any) -> Any:
        return self._do(["SREM", key, *members])

    def smembers(self, key: str) -> Any:
        return self._do(["SMEMBERS", key], lambda answer: set(answer) if len(answer) < 2 else _Ordered(answer))

    def rpush(self, key: str, *values: Any) -> Any:
        return self._do(["RPUSH", key, *values])

    def lpop(self, key: str, count: int | None = None) -> Any:
        return self._do(["LPOP", key, *([count] if count is not None else [])])

    def ltrim(self, key: str, begin: int, end: int) -> Any:
        return self._do(["LTRIM", key, begin, end], lambda answer: answer == b"OK")

    def zadd(self, key: str, scores: Mapping[Any, float]) -> Any:
        return self._do(["ZADD", key, *(item for member, score in scores.items() for item in (score, member))])

    def zrem(self, key: str, *members: Any) -> Any:
        return self._do(["ZREM", key, *members])

    def zscore(self, key: str, member: Any) -> Any:
        return self._do(["ZSCORE", key, member], lambda answer: None if answer is None else float(answer))

    def zcard(self, key: str) -> Any:
        return self._do(["ZCARD", key])

    def zrangebyscore(
        self,
        key: str,
        least: Any,
        most: Any,
        start: int | None = None,
        num: int | None = None,
        withscores: bool = False,
    ) -> Any:
        options: list[Any] = ["LIMIT", start, num] if start is not None else []
        scores = ["WITHSCORES"] if withscores else []
        return self._do(["ZRANGEBYSCORE", key, least, most, *options, *scores], _scored if withscores else _same)

    def zrevrange(self, key: str, begin: int, end: int) -> Any:
        return self._do(["ZREVRANGE", key, begin, end])

    def xadd(self, key: str, fields: Mapping[Any, Any], *, maxlen: int | None = None, approximate: bool = True) -> Any:
        limit: list[Any] = [] if maxlen is None else ["MAXLEN", *(["~"] if approximate else []), maxlen]
        return self._do(["XADD", key, *limit, "*", *(item for pair in fields.items() for item in pair)])

    def xlen(self, key: str) -> Any:
        return self._do(["XLEN", key])

    def xrange(self, key: str) -> Any:
        return self._do(["XRANGE", key, "-", "+"], _entries)


class _Ordered(set[bytes]):
    """Members of a set in an order that can be repeated, as a set of bytes has another one in each process."""

    def __init__(self, members: list[bytes]) -> None:
        super().__init__(members)
        self._members = members

    def __iter__(self) -> Any:
        return iter(self._members)


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

    def _do(self, command: list[Any], convert: Convert = _same) -> Any:
        return self._one(command_of(command), convert)

    async def _one(self, command: Command, convert: Convert) -> Any:
        (answer,) = await self.ask((command,))
        if isinstance(answer, Exception):
            raise answer
        return answer if convert is _same else convert(answer)

    async def ask(self, commands: Sequence[Command]) -> list[Any]:
        """Errors: ConnectionError, TimeoutError; whether the commands were done is not known then."""
        loop = self._loop
        for left in range(self._retries, -1, -1):
            answered: asyncio.Future[list[Any]] = asyncio.Future(loop=loop)
            reaches, back, error, count = self._network.request(self.process, len(commands))
            if reaches is not None:
                done = commands if count is None else commands[:count]
                loop.arrive(reaches, self._server.process, self._there, self._serve, done, answered, back)
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

    def _serve(self, commands: Sequence[Command], answered: asyncio.Future[list[Any]], back_s: float | None) -> None:
        self._server.unanswered.pop(answered, None)
        answers = self._server.answer(commands)
        self._network.on_served(self.process, commands, answers, back_s is None)
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

    def _do(self, command: list[Any], convert: Convert = _same) -> Any:
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
            answer if convert is _same or isinstance(answer, Exception) else convert(answer)
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
