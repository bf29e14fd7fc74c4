"""Links through the object store: bytes arrive as they were sent, and whatever breaks, nothing stays in the bucket."""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleetstart.prefetcher import relay_out
from fleetstart.prefetcher.relay import Relays, open_relays
from fleetstart.prefetcher.relay_in import LEAST_S, MOST_S, poll_after_s
from fleetstart.prefetcher.relay_objects import OBJECT_BYTES, RELAY, Link, NotOfThisLink
from fleetstart.prefetcher.relay_store import S3Objects
from fleetstart.runtime.contract.ids import PipelineId
from tests.prefetcher.nodes import S3Server, Store
from tests.prefetcher.relays import LINK, Ends, joined
from tests.servers import wait_until

NUMBERS = itertools.count()


@pytest.fixture
def relays(s3_server: S3Server, aws: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Relays]:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.url)
    relays = Relays("weights")
    yield relays
    relays.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_out, "TAKEN_S", 0.3)
    monkeypatch.setattr(relay_out, "LOOK_S", 0.1)


def left(store: Store) -> list[str]:
    """Objects of relays in the bucket."""
    found = [Path(folder, name) for folder, _, names in os.walk(store.path(RELAY)) for name in names]
    return sorted(str(path.relative_to(store.folder)) for path in found)


def wait_empty(store: Store) -> None:
    assert wait_until(lambda: "nothing" if not left(store) else "", 10, what="an empty bucket") == "nothing"


def repeats(relays: Relays) -> bool:
    """Whether some write was given up and is tried again."""
    return any(outgoing._repeated for outgoing in relays._outgoing)


def at_work(part: str) -> bool:
    return any(thread.name.startswith(part) for thread in threading.enumerate())


def says_more(ends: Ends) -> bool:
    """As a stage does that says that it is there. True once nobody hears it any more."""
    try:
        ends.sender.sendall(b"is anybody there?")
    except BrokenPipeError:
        return True
    return False


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
    link = Link(pipeline=PipelineId(f"p-{next(NUMBERS)}"), sender=3, receiver=2, secret="word")
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
    monkeypatch.setattr(relay_out, "WINDOW", 4)
    monkeypatch.setattr(relay_out, "GATHER_BYTES", 10_000)
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
        assert most <= 4 + relay_out.WRITERS
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
        assert "reads nothing" in ends.sent_failed[0]
        wait_empty(store)


def test_a_receiver_that_never_comes_is_missed_by_the_sender(relays: Relays, store: Store, impatient: None) -> None:
    ends = Ends(relays)
    ends.send()
    ends.sender.sendall(b"hello")
    assert ends.sender.recv(1) == b""
    wait_empty(store)
    assert "stage 1 reads nothing of what stage 0 sends it" in ends.sent_failed[0]
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
    monkeypatch.setattr(relay_out, "HURRIED_S", 0.1)
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
    monkeypatch.setattr(relay_out, "LATE_S", 1000.0)
    assert s3_server.process is not None
    with joined(relays) as ends:
        s3_server.process.send_signal(signal.SIGSTOP)
        ends.sender.sendall(b"late")
        wait_until(lambda: repeats(relays), what="a write that came to nothing")
        s3_server.process.send_signal(signal.SIGCONT)
        assert ends.read(4) == b"late"
        ends.sender.close()
        assert ends.receiver.recv(1) == b""
        wait_until(lambda: not at_work("relay-put") and not at_work("relay-in"), what="all but the waiting")
        assert at_work("relay-out")
        relays.close()
        assert not at_work("relay-out")
        assert left(store) == []


# ── stores that fail ───────────────────────────────────────────────────────────────────────────────


def test_a_store_that_stalls_for_a_moment_delays_and_loses_nothing(
    relays: Relays, store: Store, s3_server: S3Server
) -> None:
    assert s3_server.process is not None
    with joined(relays) as ends:
        ends.sender.sendall(b"hello")
        assert ends.read(5) == b"hello"
        s3_server.process.send_signal(signal.SIGSTOP)
        ends.sender.sendall(b"are you ")
        wait_until(lambda: repeats(relays), what="a write that came to nothing")
        ends.sender.sendall(b"still there?")
        s3_server.process.send_signal(signal.SIGCONT)
        assert ends.read(20) == b"are you still there?"
        assert (ends.sent_failed, ends.received_failed) == ([], [])
    wait_empty(store)


def test_what_a_store_carries_out_when_all_is_over_goes_too(
    relays: Relays, store: Store, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that was given up and repeated: the first one may come after its object was read and deleted."""
    monkeypatch.setattr(relay_out, "LATE_S", 3.0)
    assert s3_server.process is not None
    with joined(relays) as ends:
        s3_server.process.send_signal(signal.SIGSTOP)
        ends.sender.sendall(b"late")
        wait_until(lambda: repeats(relays), what="a write that came to nothing")
        s3_server.process.send_signal(signal.SIGCONT)
        assert ends.read(4) == b"late"
        ends.sender.close()
        assert ends.receiver.recv(1) == b""
        wait_until(lambda: not at_work("relay-in"))
        store.put(LINK.key(0), LINK.sealed(0, b"late"))
        wait_empty(store)


def test_a_store_that_stays_away_ends_both_ends_and_says_so(relays: Relays, s3_server: S3Server, store: Store) -> None:
    with joined(relays) as ends:
        ends.sender.sendall(b"hello")
        assert ends.read(5) == b"hello"
        s3_server.kill()
        ends.sender.sendall(b"hello?")
        assert ends.sender.recv(1) == b""
        assert ends.receiver.recv(1) == b""
        wait_until(lambda: ends.sent_failed and ends.received_failed, what="reasons")
        assert "the object store does not take it" in ends.sent_failed[0]
        assert "the object store does not give" in ends.received_failed[0]


def test_a_bucket_that_may_not_be_written_is_named(relays: Relays, store: Store) -> None:
    ends = Ends(relays)
    store.folder.chmod(0o700)
    relays._bucket = "no-such-bucket"
    ends.send()
    ends.sender.sendall(b"hello")
    assert ends.sender.recv(1) == b""
    wait_until(lambda: ends.sent_failed, what="a reason")
    assert "could not be written: the store answered 404 NoSuchBucket" in ends.sent_failed[0]
    ends.close()


# ── objects of others ──────────────────────────────────────────────────────────────────────────────

STRANGE = {
    "nothing": b"",
    "not an object of a link": b"hello",
    "a head alone": b"fsr1+",
    "another kind": LINK.sealed(0, b"x").replace(b"+", b"!", 1),
    "another place": LINK.sealed(1, b"x"),
    "another link": Link(pipeline=PipelineId("p-1"), sender=2, receiver=1, secret="word").sealed(0, b"x"),
    "another secret": Link(pipeline=PipelineId("p-1"), sender=0, receiver=1, secret="guess").sealed(0, b"x"),
    "changed": LINK.sealed(0, b"x")[:-1] + b"y",
    "an end that is none": LINK.sealed(0, b"x", last=False).replace(b"+", b".", 1),
    "too large": LINK.sealed(0, bytes(OBJECT_BYTES + 1)),
}


@pytest.mark.parametrize("strange", STRANGE.values(), ids=STRANGE)
def test_an_object_that_the_sender_did_not_write_ends_the_link(relays: Relays, store: Store, strange: bytes) -> None:
    store.put(LINK.key(0), strange)
    ends = Ends(relays)
    ends.receive()
    wait_until(lambda: ends.received_failed, what="a reason")
    assert LINK.key(0) in ends.received_failed[0]
    wait_empty(store)
    ends.close()


def test_objects_of_other_links_are_left_alone(relays: Relays, store: Store) -> None:
    others = [f"{RELAY}p-1/0-10/0000000000", f"{RELAY}p-1/10-1/0000000000", f"{RELAY}p-10/0-1/0000000000", "relay/x"]
    for key in others:
        store.put(key, b"of another link")
    with joined(relays) as ends:
        ends.sender.sendall(b"hello")
        assert ends.read(5) == b"hello"
        ends.sender.close()
        assert ends.receiver.recv(1) == b""
    wait_until(lambda: left(store) == sorted(others), what="only theirs")


def test_a_duplicate_that_comes_late_is_not_read_and_goes_in_the_end(relays: Relays, store: Store) -> None:
    """As of a request that was given up, and that the store carries out after its repetition."""
    with joined(relays) as ends:
        ends.sender.sendall(b"one")
        assert ends.read(3) == b"one"
        wait_until(lambda: not left(store), what="deletion")
        store.put(LINK.key(0), LINK.sealed(0, b"one"))
        ends.sender.sendall(b"two")
        assert ends.read(3) == b"two"
        ends.sender.close()
        assert ends.receiver.recv(1) == b""
    wait_empty(store)


@pytest.mark.parametrize("pipeline", ["../../checkpoints", "", "a//b"])
def test_a_pipeline_whose_name_leads_elsewhere_has_no_link(relays: Relays, store: Store, pipeline: str) -> None:
    ends = Ends(relays, Link(pipeline=PipelineId(pipeline), sender=0, receiver=1, secret="word"))
    ends.send()
    ends.receive()
    ends.sender.sendall(b"hello")
    assert ends.sender.recv(1) == b""
    wait_until(lambda: ends.sent_failed and ends.received_failed, what="reasons")
    assert "is not in the store" in ends.sent_failed[0]
    ends.close()
    assert [path for path in store.folder.parent.rglob("*") if path.is_file()] == []


# ── pure ───────────────────────────────────────────────────────────────────────────────────────────


@given(st.integers(0, 10**10 - 1), st.binary(max_size=100), st.booleans())
def test_an_object_is_opened_where_it_was_sealed_and_nowhere_else(sequence: int, data: bytes, last: bool) -> None:
    sealed = LINK.sealed(sequence, data, last=last)
    assert LINK.opened(sequence, sealed) == (data, last)
    with pytest.raises(NotOfThisLink):
        LINK.opened(sequence + 1, sealed)


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_the_next_look_is_never_late_by_more_than_a_share_of_the_pause(usual_s: float, since_s: float) -> None:
    after_s = poll_after_s(usual_s, since_s)
    assert LEAST_S <= after_s <= MOST_S
    assert after_s == LEAST_S or after_s <= max(usual_s, since_s) / 16


def test_only_a_store_that_nodes_share_can_relay(tmp_path: Path) -> None:
    assert open_relays(str(tmp_path)) is None
    assert open_relays("s3://bucket/prefix/") is not None


def test_connections_are_used_again(relays: Relays, s3_server: S3Server, store: Store) -> None:
    objects = S3Objects("weights", "")
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
