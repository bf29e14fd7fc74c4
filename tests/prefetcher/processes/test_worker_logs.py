"""Worker log lines: nothing lost, nothing unbounded, bytes of any kind."""

from __future__ import annotations

import asyncio
import itertools
import os

from hypothesis import given
from hypothesis import strategies as st

from fleetstart.prefetcher.processes.worker_logs import (
    BURST_BYTES,
    EARLY_LINES,
    MAX_BUFFERED_BYTES,
    MAX_BUFFERED_LINES,
    LineSplitter,
    LogBuffer,
    LogPipe,
    stored_bytes,
)
from fleetstart.runtime.contract.ids import FunctionName, Version, WorkerId


@given(data=st.binary(max_size=2000), cuts=st.lists(st.integers(0, 2000), max_size=10), limit=st.integers(1, 64))
def test_lines_do_not_depend_on_how_the_bytes_arrive(data: bytes, cuts: list[int], limit: int) -> None:
    def split(pieces: list[bytes]) -> list[str]:
        splitter = LineSplitter(limit)
        return [line for piece in pieces for line in splitter.feed(piece)] + splitter.close()

    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[begin:end] for begin, end in itertools.pairwise(edges)]

    whole = split([data])
    assert split(pieces) == whole
    assert all(len(line) <= limit for line in whole)


def test_lines_are_cut_at_the_limit_and_bad_utf8_is_replaced() -> None:
    splitter = LineSplitter(4)

    assert splitter.feed(b"abcdefgh\n\nok\r\n\xff") == ["abcd", "efgh", "", "ok"]
    assert splitter.close() == ["\N{REPLACEMENT CHARACTER}"]


def test_what_could_not_be_written_comes_first_again() -> None:
    logs = LogBuffer()
    for number in range(5):
        logs.write(FunctionName("f"), WorkerId("w"), Version(1), "stdout", str(number))

    batch = logs.take(3)
    logs.put_back(batch)

    assert [line.text for _, line in logs.take()] == ["0", "1", "2", "3", "4"]
    assert not logs.arrived.is_set()


def test_early_lines_are_kept_until_their_owner_is_known() -> None:
    async def scenario() -> list[str]:
        read, write = os.pipe()
        pipe = LogPipe(read)
        heard: list[str] = []
        os.write(write, b"before\n" * (EARLY_LINES + 10))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        pipe.send_to(heard.append)
        os.write(write, b"after\nrest")
        os.close(write)
        pipe.close()
        pipe.close()
        return heard

    heard = asyncio.run(scenario())

    assert heard[-2:] == ["after", "rest"]
    assert heard.count("before") == EARLY_LINES


def test_a_pipe_that_a_grandchild_keeps_open_is_not_waited_for() -> None:
    async def scenario() -> list[str]:
        read, write = os.pipe()
        pipe = LogPipe(read)
        heard: list[str] = []
        pipe.send_to(heard.append)
        os.write(write, b"last words")
        pipe.close()
        os.close(write)
        return heard

    assert asyncio.run(scenario()) == ["last words"]


def test_a_flood_of_one_function_is_bounded_in_bytes_and_costs_no_other_its_lines() -> None:
    logs = LogBuffer()
    long = "\x00" * 16_384  # six bytes each as JSON
    logs.write(FunctionName("quiet"), WorkerId("w"), Version(1), "stdout", "here")
    for _ in range(2 * MAX_BUFFERED_BYTES // stored_bytes(long)):
        logs.write(FunctionName("loud"), WorkerId("w"), Version(1), "stdout", long)
    taken: list[str] = []
    while batch := logs.take():
        taken += [line.text for _, line in batch]
    assert taken[0] == "here"
    assert MAX_BUFFERED_BYTES * 0.9 < sum(map(stored_bytes, taken)) <= MAX_BUFFERED_BYTES
    for number in range(2 * MAX_BUFFERED_LINES):
        logs.write(FunctionName("loud"), WorkerId("w"), Version(1), "stdout", str(number))
    kept = logs.take(10**6)
    assert (len(kept), kept[-1][1].text) == (MAX_BUFFERED_LINES, str(2 * MAX_BUFFERED_LINES - 1))


def test_a_worker_that_prints_too_many_bytes_loses_lines_and_is_told() -> None:
    async def scenario() -> list[str]:
        read, write = os.pipe()
        pipe = LogPipe(read)
        heard: list[str] = []
        pipe.send_to(heard.append)
        line = b"\x01" * 16_000 + b"\n"
        for _ in range(2 * BURST_BYTES // (6 * len(line))):
            await asyncio.to_thread(os.write, write, line)  # a full pipe holds it, and only reading empties that
        os.close(write)
        pipe.close()
        return heard

    heard = asyncio.run(scenario())
    assert sum(map(stored_bytes, heard[:-1])) < 1.5 * BURST_BYTES
    assert "lines dropped: more than 1000 lines or 1 MiB a second" in heard[-1]
