"""The ring of entered calls: it never excludes a call that was entered, however the worker died."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract.node.entered_calls import RECORDS, RING_BYTES, decode_ring, encode_record

names = st.sampled_from([f"inv-{number}" for number in range(40)])


def ring_of(requests: list[str]) -> bytearray:
    ring = bytearray(RING_BYTES)
    for number, request in enumerate(requests, 1):
        offset, record = encode_record(number, request)
        ring[offset : offset + len(record)] = record
    return ring


@given(st.integers(0, 2 * RECORDS), st.lists(names, max_size=60), st.integers(0, 60))
def test_an_entered_call_is_never_excluded(before: int, requests: list[str], later: int) -> None:
    """Whatever the gateway knew when it sent the call: the entered ones came after that."""
    everything = [f"before-{number}" for number in range(before)] + requests
    entered = decode_ring(bytes(ring_of(everything)))
    assert entered is not None
    known = max(0, len(everything) - later)
    assert not any(entered.excludes(request, known) for request in everything[known:])


@given(st.integers(0, 3 * RECORDS), st.integers(0, RECORDS - 1))
def test_a_call_that_was_not_entered_is_excluded_while_the_ring_holds_all_since(count: int, since: int) -> None:
    entered = decode_ring(bytes(ring_of([f"inv-{number}" for number in range(count)])))
    assert entered is not None
    assert entered.count == count
    assert entered.excludes("another", max(0, count - since))


def test_a_ring_that_has_forgotten_calls_since_proves_nothing() -> None:
    entered = decode_ring(bytes(ring_of([f"inv-{number}" for number in range(3 * RECORDS)])))
    assert entered is not None
    assert not entered.excludes("another", 0)
    assert not entered.excludes("another", 2 * RECORDS)


@given(st.integers(1, 3 * RECORDS), st.binary(min_size=16, max_size=16), st.integers(0, 16))
def test_a_worker_that_died_amid_a_record_hides_no_entered_call(count: int, record: bytes, written: int) -> None:
    requests = [f"inv-{number}" for number in range(count)]
    ring = ring_of(requests)
    offset, _ = encode_record(count + 1, "last")
    ring[offset : offset + written] = record[:written]
    entered = decode_ring(bytes(ring))
    if entered is not None:
        for known in (0, max(0, count - RECORDS), max(0, count - RECORDS // 2)):
            assert not any(entered.excludes(request, known) for request in requests[known:])


@given(st.binary(max_size=64), st.integers(0, RING_BYTES - 64))
def test_a_spoilt_ring_breaks_nothing(data: bytes, offset: int) -> None:
    ring = ring_of(["a", "b"])
    ring[offset : offset + len(data)] = data
    decode_ring(bytes(ring))
    assert decode_ring(data) is None
