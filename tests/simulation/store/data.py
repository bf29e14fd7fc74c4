"""A Redis in memory: the commands that the product uses, on bytes, at a time that the caller gives.

It has what the product relies on and nothing more; any other command or option is an error, so that a model that lacks
something is noticed. `test_store.py` compares it with a real Redis, command by command. fakeredis was looked at: it
speaks the wire protocol to an asyncio connection and takes the time from the machine, which costs ten times what a
call may here, and leaves no place for a write that is done and reported as failed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import ResponseError

from tests.simulation.store.values import OrderedMembers, SortedSet, Stream, stream_id

Reply = Any
Args = Sequence[bytes]

WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"
DROPPED_AT_MOST = 100
"""Entries that an approximate MAXLEN may leave, as a real Redis trims whole nodes of a stream only."""


class Data:
    """All keys of one Redis. `now_ms` is its clock of the day, `publish` hands a publication on."""

    def __init__(self, now_ms: Callable[[], int], publish: Callable[[bytes, bytes], int]) -> None:
        self.values: dict[bytes, Any] = {}
        self.expires_ms: dict[bytes, int] = {}
        self.now_ms = now_ms
        self._publish = publish
        self._commands: dict[bytes, Callable[[Args], Reply]] = {
            name[3:].upper().encode(): getattr(self, name) for name in dir(self) if name.startswith("_c_")
        }

    def execute(self, command: bytes, args: Args) -> Reply:
        """Errors: ResponseError, for what Redis would refuse; KeyError for a command that the model lacks."""
        return self._commands[command](args)

    # ── keys ───────────────────────────────────────────────────────────────────────────────────────

    def _find(self, key: bytes, kind: type) -> Any:
        until_ms = self.expires_ms.get(key)
        if until_ms is not None and until_ms <= self.now_ms():
            self._drop(key)
        value = self.values.get(key)
        if value is not None and type(value) is not kind:
            raise ResponseError(WRONG_TYPE)
        return value

    def _made(self, key: bytes, kind: type) -> Any:
        value = self._find(key, kind)
        if value is None:
            value = self.values[key] = kind()
        return value

    def _drop(self, key: bytes) -> bool:
        self.expires_ms.pop(key, None)
        return self.values.pop(key, None) is not None

    def _drop_empty(self, key: bytes, value: Any) -> None:
        if not value:
            self._drop(key)

    def _there(self, key: bytes) -> bool:
        until_ms = self.expires_ms.get(key)
        if until_ms is not None and until_ms <= self.now_ms():
            self._drop(key)
        return key in self.values

    def _c_exists(self, args: Args) -> Reply:
        return sum(map(self._there, args))

    def _c_del(self, args: Args) -> Reply:
        return sum(self._there(key) and self._drop(key) for key in args)

    def _c_expire(self, args: Args) -> Reply:
        if not self._there(args[0]):
            return 0
        self.expires_ms[args[0]] = self.now_ms() + int(args[1]) * 1000
        return 1

    def _c_pttl(self, args: Args) -> Reply:
        if not self._there(args[0]):
            return -2
        until_ms = self.expires_ms.get(args[0])
        return -1 if until_ms is None else until_ms - self.now_ms()

    def _c_publish(self, args: Args) -> Reply:
        return self._publish(args[0], args[1])

    def _c_time(self, args: Args) -> Reply:
        now_ms = self.now_ms()
        return [b"%d" % (now_ms // 1000), b"%d" % (now_ms % 1000 * 1000)]

    # ── strings ────────────────────────────────────────────────────────────────────────────────────

    def _c_get(self, args: Args) -> Reply:
        return self._find(args[0], bytes)

    def _c_set(self, args: Args) -> Reply:
        key, value, *options = args
        expires_ms, only_new, only_known, keep = None, False, False, False
        at = 0
        while at < len(options):
            option = options[at].upper()
            if option == b"NX":
                only_new = True
            elif option == b"XX":
                only_known = True
            elif option == b"KEEPTTL":
                keep = True
            elif option in (b"PX", b"EX"):
                at += 1
                span = int(options[at]) * (1000 if option == b"EX" else 1)
                if span <= 0:
                    raise ResponseError("invalid expire time in 'set' command")
                expires_ms = self.now_ms() + span
            else:
                raise NotImplementedError(f"SET ... {option!r}")
            at += 1
        there = self._there(key)
        if (only_new and there) or (only_known and not there):
            return None
        if not keep:
            self._drop(key)
        self.values[key] = value
        if expires_ms is not None:
            self.expires_ms[key] = expires_ms
        return b"OK"

    def _c_incr(self, args: Args) -> Reply:
        return self._c_incrby([args[0], b"1"])

    def _c_incrby(self, args: Args) -> Reply:
        text = self._find(args[0], bytes)
        number = (_integer(text) if text is not None else 0) + int(args[1])
        self.values[args[0]] = b"%d" % number
        return number

    # ── hashes ─────────────────────────────────────────────────────────────────────────────────────

    def _c_hget(self, args: Args) -> Reply:
        return (self._find(args[0], dict) or {}).get(args[1])

    def _c_hmget(self, args: Args) -> Reply:
        found = self._find(args[0], dict) or {}
        return [found.get(field) for field in args[1:]]

    def _c_hgetall(self, args: Args) -> Reply:
        return [item for pair in (self._find(args[0], dict) or {}).items() for item in pair]

    def _c_hkeys(self, args: Args) -> Reply:
        return list(self._find(args[0], dict) or {})

    def _c_hvals(self, args: Args) -> Reply:
        return list((self._find(args[0], dict) or {}).values())

    def _c_hlen(self, args: Args) -> Reply:
        return len(self._find(args[0], dict) or {})

    def _c_hset(self, args: Args) -> Reply:
        found = self._made(args[0], dict)
        before = len(found)
        for at in range(1, len(args), 2):
            found[args[at]] = args[at + 1]
        return len(found) - before

    def _c_hsetnx(self, args: Args) -> Reply:
        found = self._made(args[0], dict)
        if args[1] in found:
            return 0
        found[args[1]] = args[2]
        return 1

    def _c_hdel(self, args: Args) -> Reply:
        found = self._find(args[0], dict)
        if found is None:
            return 0
        gone = sum(found.pop(field, None) is not None for field in args[1:])
        self._drop_empty(args[0], found)
        return gone

    def _c_hincrby(self, args: Args) -> Reply:
        found = self._made(args[0], dict)
        number = _integer(found.get(args[1], b"0")) + int(args[2])
        found[args[1]] = b"%d" % number
        return number

    def _c_hscan(self, args: Args) -> Reply:
        """All of it at once: a scan may return more than COUNT says."""
        return [b"0", self._c_hgetall(args[:1])]

    # ── sets and lists ─────────────────────────────────────────────────────────────────────────────

    def _c_sadd(self, args: Args) -> Reply:
        found = self._made(args[0], OrderedMembers)
        before = len(found)
        found.update(dict.fromkeys(args[1:]))
        return len(found) - before

    def _c_srem(self, args: Args) -> Reply:
        found = self._find(args[0], OrderedMembers)
        if found is None:
            return 0
        gone = sum(1 for member in set(args[1:]) if member in found)
        for member in args[1:]:
            found.pop(member, None)
        self._drop_empty(args[0], found)
        return gone

    def _c_smembers(self, args: Args) -> Reply:
        return list(self._find(args[0], OrderedMembers) or {})

    def _c_rpush(self, args: Args) -> Reply:
        found = self._made(args[0], list)
        found.extend(args[1:])
        return len(found)

    def _c_lpop(self, args: Args) -> Reply:
        found = self._find(args[0], list)
        if found is None:
            return None
        if len(args) > 1:
            count = int(args[1])
            popped: Reply = found[:count]
            del found[:count]
        else:
            popped = found.pop(0)
        self._drop_empty(args[0], found)
        return popped

    def _c_ltrim(self, args: Args) -> Reply:
        found = self._find(args[0], list)
        if found is not None:
            begin, end = _span(int(args[1]), int(args[2]), len(found))
            found[:] = found[begin:end]
            self._drop_empty(args[0], found)
        return b"OK"

    # ── sorted sets ────────────────────────────────────────────────────────────────────────────────

    def _c_zadd(self, args: Args) -> Reply:
        found = self._made(args[0], SortedSet)
        before = len(found)
        for at in range(1, len(args), 2):
            found[args[at + 1]] = _score(args[at])
        return len(found) - before

    def _c_zrem(self, args: Args) -> Reply:
        found = self._find(args[0], SortedSet)
        if found is None:
            return 0
        gone = sum(found.pop(member, None) is not None for member in args[1:])
        self._drop_empty(args[0], found)
        return gone

    def _c_zcard(self, args: Args) -> Reply:
        return len(self._find(args[0], SortedSet) or {})

    def _c_zscore(self, args: Args) -> Reply:
        score = (self._find(args[0], SortedSet) or {}).get(args[1])
        return None if score is None else number_text(score)

    def _c_zrangebyscore(self, args: Args) -> Reply:
        key, least, most, *options = args
        found = self._find(key, SortedSet)
        low, high = _bound(least), _bound(most)
        pairs = [
            (score, member)
            for score, member in (found.ordered() if found is not None else ())
            if (score > low[0] or (score == low[0] and not low[1]))
            and (score < high[0] or (score == high[0] and not high[1]))
        ]
        scores = False
        while options:
            option = options.pop(0).upper()
            if option == b"WITHSCORES":
                scores = True
            elif option == b"LIMIT":
                offset, count = int(options.pop(0)), int(options.pop(0))
                pairs = pairs[offset : offset + count if count >= 0 else None]
            else:
                raise NotImplementedError(f"ZRANGEBYSCORE ... {option!r}")
        if scores:
            return [item for score, member in pairs for item in (member, number_text(score))]
        return [member for _, member in pairs]

    def _c_zrevrange(self, args: Args) -> Reply:
        found = self._find(args[0], SortedSet)
        members = [member for _, member in reversed(found.ordered())] if found is not None else []
        begin, end = _span(int(args[1]), int(args[2]), len(members))
        return members[begin:end]

    def _c_zremrangebyscore(self, args: Args) -> Reply:
        members = self._c_zrangebyscore(args)
        return self._c_zrem([args[0], *members]) if members else 0

    # ── streams ────────────────────────────────────────────────────────────────────────────────────

    def _c_xadd(self, args: Args) -> Reply:
        key, *rest = args
        most = None
        if rest[0].upper() == b"MAXLEN":
            about = rest[1] == b"~"
            most = int(rest[1 + about]) + about * DROPPED_AT_MOST
            del rest[: 2 + about]
        if rest[0] != b"*":
            raise NotImplementedError(f"XADD with the id {rest[0]!r}")
        stream = self._made(key, Stream)
        entry: bytes = stream.append(self.now_ms(), list(rest[1:]))
        if most is not None and len(stream.ids) > most:
            stream.cut(len(stream.ids) - most)
        return entry

    def _c_xlen(self, args: Args) -> Reply:
        stream = self._find(args[0], Stream)
        return len(stream.ids) if stream is not None else 0

    def _c_xrange(self, args: Args) -> Reply:
        if args[1:3] != (b"-", b"+") and list(args[1:3]) != [b"-", b"+"]:
            raise NotImplementedError("XRANGE of a part")
        stream = self._find(args[0], Stream)
        if stream is None:
            return []
        return [[stream_id(one), fields] for one, fields in zip(stream.ids, stream.entries, strict=True)]

    def _c_xtrim(self, args: Args) -> Reply:
        stream = self._find(args[0], Stream)
        if stream is None:
            return 0
        if args[1].upper() == b"MAXLEN":
            return stream.cut(max(0, len(stream.ids) - int(args[2])))
        if args[1].upper() == b"MINID":
            ms, _, number = args[2].partition(b"-")
            return stream.cut(bisect_left(stream.ids, (int(ms), int(number or 0))))
        raise NotImplementedError(f"XTRIM {args[1]!r}")

    def _c_xdel(self, args: Args) -> Reply:
        stream, gone = self._find(args[0], Stream), 0
        for text in args[1:] if stream is not None else ():
            ms, _, number = text.partition(b"-")
            one = (int(ms), int(number or 0))
            at = bisect_left(stream.ids, one)
            if at < len(stream.ids) and stream.ids[at] == one:
                del stream.ids[at], stream.entries[at]
                gone += 1
        return gone


WRITES = frozenset(
    b"DEL EXPIRE SET INCR INCRBY HSET HSETNX HDEL HINCRBY SADD SREM RPUSH LPOP LTRIM ZADD ZREM ZREMRANGEBYSCORE "
    b"XADD XTRIM XDEL".split()
)
"""Commands that a Redis that takes no writes refuses. PUBLISH is none."""


def number_text(number: float) -> bytes:
    return b"%d" % number if number == int(number) else repr(number).encode()


def _integer(text: bytes) -> int:
    """Errors: ResponseError for what Redis takes for no integer, such as b"" and b"+1"."""
    try:
        if b"%d" % int(text) == text:
            return int(text)
    except ValueError:
        pass
    raise ResponseError("value is not an integer or out of range")


def _score(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        raise ResponseError("value is not a valid float") from None


def _bound(text: bytes) -> tuple[float, bool]:
    """A bound of a range of scores, and whether it is exclusive."""
    return _score(text.removeprefix(b"(")), text.startswith(b"(")


def _span(begin: int, end: int, size: int) -> tuple[int, int]:
    """A range of Redis, inclusive and perhaps negative, as one of Python."""
    begin = max(0, begin + size if begin < 0 else begin)
    return begin, max(begin, (end + size if end < 0 else end) + 1)
