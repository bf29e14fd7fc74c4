"""The watch over Redis' memory and settings: bytes by family of keys, warnings, and how long traces are kept.

Every controller reads INFO. The one that schedules also walks through the keys, some each second: it counts all and
measures some, and writes the sums of a whole walk to fs:memory for the others.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import msgspec
import redis.asyncio as redis

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.sizes import GIB, MIB

from ..redis_client import REDIS_ERRORS
from .memory_budget import FAMILIES, OTHERS, family_of, is_one_of_many, memory_problems, pressure, trace_kept_s
from .server_facts import ServerFacts, facts_of, settings_problems

log = logging.getLogger(__name__)

EVERY_S = 1.0
INFO_S = 5.0
KEYS_AT_ONCE = 200
"""Keys that are counted a second: a walk through 100,000 takes eight minutes, and a millisecond of each second."""
MEASURED = 8
"""Of keys that are many and alike, one in so many is measured."""
KEPT_S = 24 * 3600
_NUMBERS = re.compile(r"[\d.,]+")
_SUMS = msgspec.json.Decoder(dict[str, int])


Group = tuple[str, bool]
"""A family, and whether its keys are many and alike: each kind is measured by itself."""


class Walk:
    """The sums of one walk through the keys."""

    def __init__(self) -> None:
        self.cursor = 0
        self._counted: Counter[Group] = Counter()
        self._measured: Counter[Group] = Counter()
        self._bytes: Counter[Group] = Counter()

    def chosen(self, names: list[str]) -> list[tuple[Group, str]]:
        """Counts keys, and returns those to measure, with their groups."""
        found = []
        for name in names:
            group = (family_of(name), is_one_of_many(name))
            if not group[1] or self._counted[group] % MEASURED == 0:
                found.append((group, name))
            self._counted[group] += 1
        return found

    def measured(self, group: Group, size_bytes: int) -> None:
        self._measured[group] += 1
        self._bytes[group] += size_bytes

    def sums(self) -> dict[str, int]:
        found = {name: 0 for name in (*(family.name for family in FAMILIES), OTHERS)}
        for group, count in self._counted.items():
            found[group[0]] += self._bytes[group] * count // max(1, self._measured[group])
        return found


class MemoryWatch:
    def __init__(self, client: redis.Redis, *, leads: Callable[[], bool]) -> None:
        self._client = client
        self._leads = leads
        self.facts: ServerFacts | None = None
        self.families: dict[str, int] = {}
        """Bytes by family, of the last whole walk."""
        self.problems: list[str] = []
        self._full = 0.0
        self._walk = Walk()
        self._told: frozenset[str] = frozenset()

    async def run(self) -> None:
        read_s = 0.0
        while True:
            try:
                if time.monotonic() - read_s > INFO_S:
                    read_s = time.monotonic()
                    await self.read()
                if self._leads():
                    await self.step()
            except REDIS_ERRORS as error:
                log.debug("redis' memory was not read", extra={"error": str(error)})
            await asyncio.sleep(EVERY_S)

    def trace_kept_s(self, *, failed: bool) -> int:
        return trace_kept_s(self._full, failed=failed)

    async def read(self) -> None:
        """Reads what the server says of itself, and what the walk found last. Errors: REDIS_ERRORS."""
        info: Mapping[str, Any] = await self._client.info()
        facts = self.facts = facts_of(info)
        raw = cast(bytes | None, await self._client.get(keys.MEMORY))
        try:
            self.families = _SUMS.decode(raw) if raw else {}
        except msgspec.DecodeError:
            self.families = {}
        self._full = pressure(facts.used_bytes, facts.limit_bytes, self.families.get(FAMILIES[0].name, 0))
        size = f"{_size(facts.used_bytes)} of {_size(facts.limit_bytes)}"
        self.problems = settings_problems(facts) + memory_problems(
            facts.used_bytes, facts.limit_bytes, self.families, limited=facts.limited, size=size
        )
        self._tell()

    def _tell(self) -> None:
        """Logs each kind of problem once, as long as it lasts."""
        kinds = {_NUMBERS.sub("", problem): problem for problem in self.problems}
        for kind, problem in kinds.items():
            if kind not in self._told:
                log.warning("redis needs attention", extra={"problem": problem})
        self._told = frozenset(kinds)

    async def step(self) -> None:
        """Walks on; at the end, writes the sums. Errors: REDIS_ERRORS."""
        walk = self._walk
        cursor, names = await cast(Awaitable[Any], self._client.scan(walk.cursor, match="fs:*", count=KEYS_AT_ONCE))
        chosen = walk.chosen([name.decode(errors="replace") for name in names])
        if chosen:
            async with self._client.pipeline(transaction=False) as pipe:
                for _, name in chosen:
                    pipe.memory_usage(name)
                for (group, _), size_bytes in zip(chosen, await pipe.execute(), strict=True):
                    walk.measured(group, int(size_bytes or 0))
        walk.cursor = int(cursor)
        if not walk.cursor:
            self._walk = Walk()
            await self._client.set(keys.MEMORY, msgspec.json.encode(walk.sums()), ex=KEPT_S)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= GIB else f"{size_bytes / MIB:.0f} MiB"
