"""Stored sums: a bill is the plain sum of its rows, whichever of its sums are stored, missing or damaged."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from fleetstart.controller.billing import group_sums, stored_sums
from fleetstart.controller.billing.archive_format import LedgerEntry
from fleetstart.controller.billing.archive_store import LedgerArchive, segment_key
from fleetstart.controller.billing.group_sums import BLOCK_SIZES, all_blocks, blocks, joined, sum_rows
from fleetstart.controller.billing.ledger_reader import LedgerReader
from fleetstart.controller.billing.stored_sums import FOLDER, StoredSums
from fleetstart.controller.billing.usage import InvoiceSums, UsageSums
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.ledger import LedgerRow
from fleetstart.runtime.contract.ids import FunctionName
from tests.controller.billing.rows import call, phase
from tests.controller.billing.test_compactor import SEGMENT_ROWS, World, world

HOUR_MS = 3_600_000
BEGIN_MS = 480_000 * HOUR_MS
SEGMENTS = BLOCK_SIZES[0] + BLOCK_SIZES[1] + 5


def some_row(dice: random.Random, number: int) -> LedgerRow:
    function, tags = dice.choice("fgh"), dice.choice([None, {"team": "a"}, {"team": "b", "env": "x"}])
    if dice.random() < 0.5:
        row = call(f"c{number}", cost=dice.randrange(10**9), function=function, version=dice.randint(1, 2), tags=tags)
        return msgspec.structs.replace(
            row, key=dice.choice(["", "k"]), price=dice.randint(1, 2), device_type=dice.choice(["", "H100"]),
            device_bytes=dice.choice([0, 80 << 30]), billed_ms=dice.randrange(10**9), parent=f"p{number}",
            caller=dice.choice(["", "f"]),
        )  # fmt: skip
    idle = phase(f"p{number}", cost=dice.choice([0, 7]), function=function, of=dice.choice(["idle", "load"]), tags=tags)
    used = dice.choice([None, 5])
    return msgspec.structs.replace(idle, cpu_ms=used, memory_peak_bytes=dice.randrange(9), project="team")


async def written(it: World, dice: random.Random) -> list[LedgerEntry]:
    """A ledger of two blocks of segments, some single ones and some rows in Redis, over a month; often several rows
    have the same millisecond."""
    at_ms, number = BEGIN_MS, 0
    for last in [False] * SEGMENTS + [True]:
        async with it.client.pipeline() as pipe:
            for _ in range(dice.randint(1, SEGMENT_ROWS)):
                at_ms += dice.choice([0, 0, 1, HOUR_MS, 9 * HOUR_MS])
                row = some_row(dice, number)
                pipe.xadd(keys.LEDGER, {"row": msgspec.json.encode(row)}, id=f"{at_ms}-{number + 1}")
                number += 1
            await pipe.execute()
        if not last:
            await it.compact()
    return await it.entries()


def sums_of(it: World) -> StoredSums:
    archive = LedgerArchive(it.store)
    return StoredSums(it.store, archive, LedgerReader(it.client, archive), lambda: 1)


async def made(it: World) -> int:
    maker, number = sums_of(it), 0
    while await maker.make_one():
        number += 1
    return number


@pytest.mark.slow
def test_a_bill_is_the_sum_of_its_rows_with_any_of_the_sums_stored(redis_url: str) -> None:
    dice = random.Random(5)

    async def check(it: World, entries: list[LedgerEntry]) -> None:
        times = sorted({entry.id.unix_ms for entry in entries})
        for _ in range(25):
            since, until = sorted(dice.choice(times) + dice.choice([-1, 0, 1]) for _ in range(2))
            rows = sum_rows(entry for entry in entries if since <= entry.id.unix_ms < until)
            assert joined([part async for part in sums_of(it).read(since, until)]) == rows

    async def scenario() -> None:
        async with world(redis_url) as it:
            entries = await written(it, dice)
            await check(it, entries)  # none is stored yet, as after an upgrade
            assert await made(it) == SEGMENTS + 5 + 1
            assert await made(it) == 0
            await check(it, entries)
            stored = await it.store.list(FOLDER)
            for one in dice.sample(stored, len(stored) // 2):
                data = await it.store.read(one.key, 1 << 20) or b""
                await it.store.delete(one.key)
                if dice.random() < 0.6:
                    another = await it.store.read(dice.choice(stored).key, 1 << 20) or b""
                    await it.store.create(one.key, dice.choice([b"", data[: len(data) // 2], data + b"x", another]))
            await check(it, entries)
            await made(it)
            await it.write(call("late", cost=5, at=BEGIN_MS))  # work of the first hour that is booked now
            await it.compact()
            assert await made(it) == 1, "the older ones stay"
            total = UsageSums(by=("function",))
            async for part in sums_of(it).read(0, 1 << 53):
                total.add(part)
            assert total.result(0, 1).total_nusd == sum(entry.row.cost_nusd for entry in entries) + 5

    asyncio.run(scenario())


def test_a_bill_of_segments_that_are_summed_reads_none_of_them(redis_url: str) -> None:
    async def scenario() -> None:
        async with world(redis_url) as it:
            entries = await written(it, random.Random(1))
            await made(it)
            inside = (await it.reader.headers())[1:-1]
            since, until = inside[0].first.unix_ms, inside[-1].last.unix_ms + 1
            for header in inside[5:-5]:
                await it.store.delete(segment_key(header.sequence))
            sums = InvoiceSums()
            async for part in sums_of(it).read(since, until):
                sums.add(part)
            invoice = sums.result("2024-10", complete=True, segments=0, checksum="")
            rows = [entry.row for entry in entries if since <= entry.id.unix_ms < until]
            assert (invoice.rows, invoice.total_nusd) == (len(rows), sum(row.cost_nusd for row in rows))

    asyncio.run(scenario())


def test_a_sum_of_other_segments_is_not_used(redis_url: str) -> None:
    """Such as that of a store that two systems share, or one with the same rows and cost that were booked to another
    group."""

    async def scenario() -> None:
        async with world(redis_url) as it:
            await it.write(*(call(f"{i}", cost=1, at=10**14) for i in range(SEGMENT_ROWS)))
            await it.compact()
            [header] = await it.reader.headers()
            rows = sum_rows(await it.entries()).items()
            forged = [(msgspec.structs.replace(group, function=FunctionName("other")), one) for group, one in rows]
            elsewhere = msgspec.structs.replace(header, body_sha256="0" * 64)
            key = stored_sums.sum_key(group_sums.Block(1, 1))
            await it.store.create(key, group_sums.pack_sums(forged, [elsewhere]))
            [sums] = [part async for part in sums_of(it).read(0, 1 << 53)]
            assert {group.function for group, _ in sums} == {"f"}
            assert await it.store.read(key, 1 << 20) is None, "it is made anew"

    asyncio.run(scenario())


def test_a_sum_that_is_too_large_is_not_stored(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not be read again, and would be removed and made for ever."""
    monkeypatch.setattr(group_sums, "SUM_MAX_BYTES", 100)

    async def scenario() -> None:
        async with world(redis_url) as it:
            await it.write(call("a", cost=1, at=10**14))
            await it.compact()
            assert await made(it) == 1, "it is tried once"
            assert await it.store.list(FOLDER) == []
            [sums] = [list(part) async for part in sums_of(it).read(0, 1 << 53)]
            assert [one.cost_nusd for _, one in sums] == [1]

    asyncio.run(scenario())


def test_blocks_are_the_fewest_that_have_each_segment_once() -> None:
    largest, middle, _ = BLOCK_SIZES
    for first in (1, 2, middle, largest, largest + 1):
        for last in range(first, 3 * largest):
            found = list(blocks(first, last))
            numbers = [n for one in found for n in range(one.first, one.first + one.segments)]
            assert numbers == list(range(first, last + 1))
            assert sum(one.segments == 1 for one in found) <= 2 * (middle - 1)
            assert sum(one.segments == middle for one in found) <= 2 * (largest // middle - 1)
            assert set(found) <= set(all_blocks(last))
