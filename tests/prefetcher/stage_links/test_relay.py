"""Relayed links: bytes arrive as they were sent, and whatever fails, no object stays in the bucket."""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleetstart.prefetcher.sources.http_settings import HttpSettings
from fleetstart.prefetcher.stage_links import relay_sender
from fleetstart.prefetcher.stage_links.relay import Relays, open_relays
from fleetstart.prefetcher.stage_links.relay_messages import OBJECT_BYTES, InvalidRelayObject, RelayLink
from fleetstart.prefetcher.stage_links.relay_receiver import LEAST_S, MOST_S, poll_after_s
from fleetstart.prefetcher.stage_links.relay_store import RelayStore
from fleetstart.runtime.contract.ids import PipelineId
from tests.prefetcher.nodes import S3Server, Store
from tests.prefetcher.relays import LINK, Ends, at_work, carry_late, joined, left, says_more, wait_empty
from tests.servers import wait_until

NUMBERS = itertools.count()


# ── as it should be ────────────────────────────────────────────────────────────────────────────────


def test_what_is_written_arrives_and_nothing_stays(relays: Relays, store: Store) -> None:
    with joined(relays) as ends:
        for text in (b"hello", b"and", b"good bye"):
            ends.sender.sendall(text)
            assert ends.read(len(text)) == text
        ends.sender.close()
        assert ends.receiver.recv(1) == b"", "the end of the sender is the end of the link"
        assert (ends.sent_failed, ends.received_failed) == ([], [])
        wait_empty(store)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(pieces=st.lists(st.one_of(st.integers(1, 2000), st.integers(OBJECT_BYTES - 2, OBJECT_BYTES + 2)), max_size=12))
def test_any_sequence_of_writes_arrives_as_it_was(relays: Relays, store: Store, pieces: list[int]) -> None:
    link = RelayLink(pipeline=PipelineId(f"p-{next(NUMBERS)}"), sender=3, receiver=2, secret="word")
    data = os.urandom(sum(pieces))
    got: list[bytes] = []
    with joined(relays, link) as ends:
        reader = threading.Thread(target=lambda: got.append(ends.read(len(data) + 1) if data else b""))
        reader.start()
        at = 0
        for size_bytes in pieces:
            ends.sender.sendall(data[at : at + size_bytes])
            at += size_bytes
        ends.sender.close()
        reader.join(30)
    assert got == [data]
    wait_empty(store)


def test_more_than_the_window_arrives_in_order_and_little_of_it_lies_in_the_store(
    relays: Relays, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_sender, "WINDOW", 4)
    monkeypatch.setattr(relay_sender, "GATHER_BYTES", 10_000)
    data = os.urandom(20 * OBJECT_BYTES)
    with joined(relays) as ends:
        writer = threading.Thread(target=ends.sender.sendall, args=(data,))
        writer.start()
        most = 0
        digest = hashlib.sha256()
        for _ in range(20):
            digest.update(ends.read(OBJECT_BYTES))
            most = max(most, len(left(store)))
        writer.join(10)
        assert digest.digest() == hashlib.sha256(data).digest()
        assert most <= 4 + relay_sender.WRITERS
    wait_empty(store)


def test_the_receiver_may_come_later(relays: Relays, store: Store) -> None:
    ends = Ends(relays)
    ends.send()
    ends.sender.sendall(b"early")
    wait_until(lambda: left(store), what="the first object")
    ends.receive()
    assert ends.read(5) == b"early"
    ends.close()
    wait_empty(store)


# ── ends ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_receiver_that_ends_is_missed_by_the_sender(relays: Relays, store: Store, impatient: None) -> None:
    with joined(relays) as ends:
        ends.sender.sendall(b"hello")
        assert ends.read(5) == b"hello"
        ends.receiver.close()
        wait_until(lambda: says_more(ends), what="the end of its link")
        wait_until(lambda: ends.sent_failed, what="a reason")
        assert "does not read" in ends.sent_failed[0]
        wait_empty(store)


def test_a_receiver_that_never_comes_is_missed_by_the_sender(relays: Relays, store: Store, impatient: None) -> None:
    ends = Ends(relays)
    ends.send()
    ends.sender.sendall(b"hello")
    assert ends.sender.recv(1) == b""
    wait_empty(store)
    assert "stage 1 does not read what stage 0 sends" in ends.sent_failed[0]
    ends.close()


def test_a_sender_that_ends_without_a_reader_leaves_nothing(relays: Relays, store: Store, impatient: None) -> None:
    ends = Ends(relays)
    ends.send()
    ends.sender.sendall(b"hello")
    ends.sender.close()
    wait_until(lambda: ends.sent_failed, what="the end of the link")
    wait_empty(store)
    ends.close()


def test_a_receiver_whose_worker_ends_before_a_word_came_asks_no_more(relays: Relays) -> None:
    ends = Ends(relays)
    ends.receive()
    ends.stop()
    ends.close()
    wait_until(lambda: not any(thread.is_alive() for thread in relays._threads), what="end of its threads")


def test_closing_removes_what_nobody_has_read(relays: Relays, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_sender, "CLOSING_ACK_S", 0.1)
    ends = Ends(relays)
    ends.send()
    ends.sender.sendall(b"hello")
    wait_until(lambda: left(store), what="an object")
    ends.sender.close()
    relays.close()
    assert left(store) == []
    ends.close()


def test_closing_does_not_wait_for_what_a_store_may_carry_out_late(
    relays: Relays, store: Store, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_sender, "LATE_S", 1000.0)
    with joined(relays) as ends:
        carry_late(relays, s3_server, ends)
        wait_until(lambda: not at_work("relay-put") and not at_work("relay-in"), what="all but the waiting")
        assert at_work("relay-out")
        relays.close()
        assert not at_work("relay-out")
        assert left(store) == []


# ── pure ───────────────────────────────────────────────────────────────────────────────────────────


@given(st.integers(0, 10**10 - 1), st.binary(max_size=100), st.booleans())
def test_an_object_is_opened_where_it_was_sealed_and_nowhere_else(sequence: int, data: bytes, last: bool) -> None:
    sealed = LINK.seal(sequence, data, last=last)
    assert LINK.unseal(sequence, sealed) == (data, last)
    with pytest.raises(InvalidRelayObject):
        LINK.unseal(sequence + 1, sealed)


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_the_next_look_is_never_late_by_more_than_a_share_of_the_pause(usual_s: float, since_s: float) -> None:
    after_s = poll_after_s(usual_s, since_s)
    assert LEAST_S <= after_s <= MOST_S
    assert after_s == LEAST_S or after_s <= max(usual_s, since_s) / 16


def test_only_a_store_that_nodes_share_can_relay(tmp_path: Path) -> None:
    assert open_relays(str(tmp_path)) is None
    assert open_relays("s3://bucket/prefix/") is not None


def test_connections_are_used_again(relays: Relays, s3_server: S3Server, store: Store) -> None:
    objects = RelayStore("weights", "", HttpSettings())
    for _ in range(3):
        objects.put("relay/x/0-1/0", b"hello")
        assert objects.exists("relay/x/0-1/0")
        assert objects.get("relay/x/0-1/0", 100) == b"hello"
        assert objects.keys("relay/x/") == ["relay/x/0-1/0"]
        objects.delete("relay/x/0-1/0")
    (idle,) = objects._connections._idle.values()
    assert len(idle) == 1
    assert objects.get("relay/x/0-1/0", 100) is None
    assert not objects.exists("relay/x/0-1/0")
    objects.close()


def test_a_socket_is_all_that_a_worker_sees(relays: Relays) -> None:
    with joined(relays) as ends:
        assert ends.sender.family == socket.AF_UNIX
