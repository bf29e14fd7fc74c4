"""Reads that go on by another connection when one fails, here with TCP for each; with RDMA first in tests/rdma."""

from __future__ import annotations

import contextlib

import pytest

from fleetstart.native import TcpReader
from fleetstart.prefetcher.network.rdma_devices import rdma_devices
from fleetstart.prefetcher.peers.rdma import Range, RangesFailed, read_ranges, register
from tests.native.transport.peers import CHUNK, CHUNKS, CONTENT, SIZE, SLAB, checksum, region, serving, whole

RANGES = [Range(chunk, chunk * CHUNK, CHUNK) for chunk in range(CHUNKS)]


def test_what_one_connection_did_not_bring_comes_by_the_next_each_range_once() -> None:
    into = region()
    with serving() as dying, serving() as living:
        came = {}
        readers = (lambda: TcpReader(dying.socket.fileno(), into), lambda: TcpReader(living.socket.fileno(), into))
        for one, digest in read_ranges(RANGES, readers):
            assert one.number not in came
            came[one.number] = digest
            if len(came) == 3:
                dying.server.stop()
    assert came == {chunk: checksum(CONTENT[chunk * CHUNK : (chunk + 1) * CHUNK]) for chunk in range(CHUNKS)}
    assert whole(into) == CONTENT


def test_a_range_that_is_refused_is_asked_for_at_the_next_connection() -> None:
    into = region()
    with serving(allowed=[(0, 2)]) as narrow, serving() as wide:
        readers = (lambda: TcpReader(narrow.socket.fileno(), into), lambda: TcpReader(wide.socket.fileno(), into))
        assert sorted(one.number for one, _ in read_ranges(RANGES, readers)) == list(range(CHUNKS))
    assert whole(into) == CONTENT


def test_where_no_connection_brings_them_the_error_names_what_is_missing() -> None:
    def unreachable() -> TcpReader:
        raise ConnectionRefusedError("no route")

    into = region()
    with serving(allowed=[(0, 0)]) as refusing, pytest.raises(RangesFailed, match=r"no route; .*refused") as raised:
        list(read_ranges(RANGES[:3], (unreachable, lambda: TcpReader(refusing.socket.fileno(), into))))
    assert raised.value.missing == RANGES[:3]


def test_a_read_that_is_given_up_leaves_no_connection_that_writes() -> None:
    into = region()
    with serving() as server:
        readers = (lambda: TcpReader(server.socket.fileno(), into),)
        with contextlib.closing(read_ranges(RANGES, readers)) as reading:
            next(reading)
        assert server.ended() == "closed"
        with pytest.raises(RangesFailed, match="stopped"):
            list(read_ranges(RANGES[:1], readers, stopped=lambda: True))


def test_memory_is_registered_where_there_is_a_usable_device() -> None:
    usable = any(device.usable for device in rdma_devices())
    assert (register(region(), SIZE, SLAB, range(SIZE // SLAB)) is not None) == usable
