"""The background throttle: never above its share, whatever the clock does; small portions; its use by S3."""

from __future__ import annotations

import heapq
import os
import socket
import threading
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.prefetcher.sources import throttle
from fleetstart.prefetcher.sources.base import ObjectRange, Piece
from fleetstart.prefetcher.sources.s3 import S3Source
from fleetstart.prefetcher.sources.throttle import CREDIT_S, PORTION_BYTES, SHARE, WINDOW_BYTES, BackgroundThrottle
from tests.prefetcher.faulty_s3 import FaultyS3, resets_after

MBIT_200 = 25e6


@given(
    st.floats(1e5, 1e10),
    st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0, 0.1)), min_size=1, max_size=50),
)
def test_what_is_read_is_never_ahead_of_its_share_by_more_than_the_credit(
    bytes_per_s: float, reads: list[tuple[int, float]]
) -> None:
    pace = BackgroundThrottle()
    pace.set_measured(bytes_per_s)
    now_s = 1000.0
    read_bytes = 0
    for size_bytes, idle_s in reads:
        now_s += idle_s
        now_s += pace.delay_s(size_bytes, now_s)
        assert read_bytes <= (now_s - 1000.0 + CREDIT_S) * bytes_per_s * SHARE + 1
        read_bytes += size_bytes


def test_who_reads_without_a_break_gets_all_of_its_share() -> None:
    pace = BackgroundThrottle()
    pace.set_measured(MBIT_200)
    now_s = 0.0
    for _ in range(1000):
        now_s += pace.delay_s(pace.portion_bytes, now_s)
    assert 1000 * pace.portion_bytes / now_s == pytest.approx(MBIT_200 * SHARE, rel=0.01)


@pytest.mark.parametrize(("round_trip_s", "connections"), [(0.0005, 1), (0.003, 1), (0.01, 3), (0.02, 5), (0.2, 8)])
def test_a_long_way_to_the_store_gets_as_many_connections_as_the_rate_takes(
    round_trip_s: float, connections: int
) -> None:
    """Each connection brings a window in a round trip, in portions."""
    bytes_per_s = 400e6
    pace, now_s, read_bytes = BackgroundThrottle(), 100.0, 0
    pace.set_measured(bytes_per_s)
    per_round = -(-pace.window_bytes // pace.portion_bytes)
    free: list[tuple[float, int]] = [(now_s, 0)]
    begun = 1
    while now_s < 130.0:
        for number in range(begun, pace.connections()):
            heapq.heappush(free, (now_s, number))
        begun = max(begun, pace.connections())
        now_s, number = heapq.heappop(free)
        at_s = now_s
        for _ in range(per_round):
            at_s += pace.delay_s(pace.portion_bytes, at_s)
            if now_s > 120.0:
                read_bytes += pace.portion_bytes
        heapq.heappush(free, (max(at_s, now_s + round_trip_s), number))
    assert abs(pace.connections() - connections) <= 1
    possible = connections * pace.window_bytes / round_trip_s
    assert read_bytes / 10 >= 0.75 * min(bytes_per_s * SHARE, possible)


def test_a_pause_and_an_idle_time_are_no_reason_for_more_connections() -> None:
    pace = BackgroundThrottle()
    pace.set_measured(MBIT_200)
    now_s = 100.0
    for _ in range(50):
        now_s += 5.0
        for _ in range(200):
            now_s += pace.delay_s(pace.portion_bytes, now_s)
    assert pace.connections() == 1


@given(st.floats(0, 1e12))
def test_portions_and_windows_are_a_moment_of_the_link(bytes_per_s: float) -> None:
    pace = BackgroundThrottle()
    pace.set_measured(bytes_per_s)
    assert PORTION_BYTES[0] <= pace.portion_bytes <= PORTION_BYTES[1]
    assert WINDOW_BYTES[0] <= pace.window_bytes <= WINDOW_BYTES[1]


def test_nothing_is_held_back_before_the_source_was_measured() -> None:
    assert [BackgroundThrottle().delay_s(1 << 30, 1.0) for _ in range(3)] == [0.0, 0.0, 0.0]


def test_while_others_wait_for_theirs_it_holds_still_until_they_have_it() -> None:
    pace, holds_still, events = BackgroundThrottle(), threading.Event(), list[str]()

    def stopped() -> bool:
        holds_still.set()
        return False

    def read() -> None:
        pace.wait(1, stopped)
        events.append("reads on")

    reader = threading.Thread(target=read)
    with pace.urgent():
        reader.start()
        assert holds_still.wait(5)
        events.append("others have theirs")
    reader.join(5)
    assert events == ["others have theirs", "reads on"]


def test_it_holds_still_no_longer_than_a_store_keeps_a_connection_or_once_it_is_stopped() -> None:
    pace = BackgroundThrottle()
    with pace.urgent():
        pace.wait(1, lambda: False)
        pace.wait(1, lambda: True)


def test_paced_reads_have_connections_with_small_buffers_of_their_own(
    tmp_path: Path, aws: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights").mkdir()
    data = os.urandom(1 << 20)
    (tmp_path / "weights" / "part").write_bytes(data)
    server = FaultyS3(tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    waited: list[int] = []
    monkeypatch.setattr(
        throttle.BackgroundThrottle, "wait", lambda self, size_bytes, stopped: waited.append(size_bytes)
    )
    source, pace = S3Source(bucket="weights"), BackgroundThrottle()
    pace.set_measured(MBIT_200)

    def read(pace: BackgroundThrottle | None) -> None:
        into = memoryview(bytearray(len(data)))
        found = list(source.read(ObjectRange("part", len(data), 0, [Piece(len(data), into)], pace), lambda: False))
        assert found == [xxhash.xxh3_64_intdigest(data)]

    try:
        read(pace)
        assert sum(waited) == len(data)
        assert max(waited) <= pace.portion_bytes
        read(pace)
        read(None)
        assert sum(waited) == 2 * len(data)
        (slow,), (quick,) = (
            [connection for idle in pool._idle.values() for connection in idle]
            for pool in (source._throttled, source._connections)
        )
        sizes = [end.sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) for end in (slow, quick)]
        assert sizes[0] == 2 * pace.window_bytes
        assert sizes[0] < sizes[1]
        server.faults = [resets_after(1000)]
        read(pace)
    finally:
        server.close()
