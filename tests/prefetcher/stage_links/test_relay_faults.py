"""Relayed links through a store that stalls or fails, and forged objects: no wrong byte is delivered."""

from __future__ import annotations

import signal

import pytest

from fleetstart.prefetcher.sources.errors import SourceError
from fleetstart.prefetcher.stage_links import relay_sender
from fleetstart.prefetcher.stage_links.relay import Relays
from fleetstart.prefetcher.stage_links.relay_messages import OBJECT_BYTES, RelayLink
from fleetstart.prefetcher.stage_links.relay_store import RelayStore
from fleetstart.runtime.contract.ids import PipelineId
from fleetstart.runtime.contract.object_keys import RELAY
from tests.prefetcher.nodes import S3Server, Store
from tests.prefetcher.relays import LINK, Ends, at_work, carry_late, joined, left, repeats, wait_empty
from tests.servers import wait_until

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
    """Of a write that was repeated, the first one may come after its object was read and deleted."""
    monkeypatch.setattr(relay_sender, "LATE_S", 3.0)
    with joined(relays) as ends:
        carry_late(relays, s3_server, ends)
        wait_until(lambda: not at_work("relay-in"))
        store.put(LINK.key(0), LINK.seal(0, b"late"))
        wait_empty(store)


def test_objects_are_removed_from_a_store_that_is_slow_to_answer(
    relays: Relays, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first requests to delete something have no answer in time: what stages said would lie there for hours."""
    delete, late = RelayStore.delete, iter(range(3))

    def slow(objects: RelayStore, key: str) -> None:
        if next(late, None) is not None:
            raise SourceError(f"{key}: no answer in 0.5 s")
        delete(objects, key)

    monkeypatch.setattr(RelayStore, "delete", slow)
    monkeypatch.setattr(relay_sender, "REMOVE_RETRY_S", 0.01)
    with joined(relays) as ends:
        ends.sender.sendall(b"hello")
        assert ends.read(5) == b"hello"
        ends.receiver.close()
        wait_until(lambda: not at_work("relay-in"), what="the receiver's end")
    wait_empty(store)
    assert next(late, None) is None


def test_a_store_that_stays_away_ends_both_ends_and_says_so(relays: Relays, s3_server: S3Server, store: Store) -> None:
    with joined(relays) as ends:
        ends.sender.sendall(b"hello")
        assert ends.read(5) == b"hello"
        s3_server.kill()
        ends.sender.sendall(b"hello?")
        assert ends.sender.recv(1) == b""
        assert ends.receiver.recv(1) == b""
        wait_until(lambda: ends.sent_failed and ends.received_failed, what="reasons")
        assert "cannot write to the object store" in ends.sent_failed[0]
        assert "cannot read from the object store" in ends.received_failed[0]


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
    "a head alone": b"fsr2+",
    "another kind": LINK.seal(0, b"x").replace(b"+", b"!", 1),
    "another place": LINK.seal(1, b"x"),
    "another link": RelayLink(pipeline=PipelineId("p-1"), sender=2, receiver=1, secret="word").seal(0, b"x"),
    "another secret": RelayLink(pipeline=PipelineId("p-1"), sender=0, receiver=1, secret="guess").seal(0, b"x"),
    "changed": LINK.seal(0, b"x")[:-1] + b"y",
    "an end that is none": LINK.seal(0, b"x", last=False).replace(b"+", b".", 1),
    "too large": LINK.seal(0, bytes(OBJECT_BYTES + 1)),
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
        store.put(LINK.key(0), LINK.seal(0, b"one"))
        ends.sender.sendall(b"two")
        assert ends.read(3) == b"two"
        ends.sender.close()
        assert ends.receiver.recv(1) == b""
    wait_empty(store)


@pytest.mark.parametrize("pipeline", ["../../checkpoints", "", "a//b"])
def test_a_pipeline_whose_name_leads_elsewhere_has_no_link(relays: Relays, store: Store, pipeline: str) -> None:
    ends = Ends(relays, RelayLink(pipeline=PipelineId(pipeline), sender=0, receiver=1, secret="word"))
    ends.send()
    ends.receive()
    ends.sender.sendall(b"hello")
    assert ends.sender.recv(1) == b""
    wait_until(lambda: ends.sent_failed and ends.received_failed, what="reasons")
    assert "is not in the store" in ends.sent_failed[0]
    ends.close()
    assert [path for path in store.folder.parent.rglob("*") if path.is_file()] == []
