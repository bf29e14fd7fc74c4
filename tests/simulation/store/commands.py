"""Commands of the simulated Redis as methods of `redis.asyncio.Redis`: those that the product calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.simulation.store.server import Command

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


def as_is(answer: Any) -> Any:
    return answer


def _mapping(answer: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(answer[::2], answer[1::2], strict=True))


def _scored(answer: list[bytes]) -> list[tuple[bytes, float]]:
    return [(member, float(score)) for member, score in zip(answer[::2], answer[1::2], strict=True)]


def _entries(answer: list[Any]) -> list[tuple[bytes, dict[bytes, bytes]]]:
    return [(entry, _mapping(fields)) for entry, fields in answer]


class Commands:
    """redis-py's methods as commands. `_do` sends one: a client answers it, a pipeline collects it."""

    def _do(self, command: list[Any], convert: Convert = as_is) -> Any:
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
        return self._do(["ZRANGEBYSCORE", key, least, most, *options, *scores], _scored if withscores else as_is)

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
