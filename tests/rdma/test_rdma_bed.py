"""RDMA between two guests of the bed, started once for all tests: ours against pyverbs, deaths, and the way to TCP.

The guests are emulated, twenty times as slow as real ones, and share the machine with other tests. So bounds on how
soon an end is noticed are the promise, a second, and SLACK_S for that.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.prefetcher.nodes import CHUNK_BYTES, Store
from tests.prefetcher.stages import LAYER_CHUNKS, LAYERS, Model
from tests.rdma.bed import HERE, run_guests, why_not
from tests.rdma.guests.region import CHUNKS, SLAB_BYTES, SLABS

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

TIMEOUT_S = 240.0
FIRST_HELD = 9
"""Chunks that the holder of a model has before the others."""
MODEL_BYTES = (1 + LAYERS * LAYER_CHUNKS) * CHUNK_BYTES
PROMISE_S = 1.0
SLACK_S = 4.0
"""Emulation on a busy machine: a guest may stand still for seconds. An end that the side channel misses is noticed only
by what the tests switch off, after thirty."""


@pytest.fixture(scope="module")
def findings() -> Iterator[dict[str, Any]]:
    """What the reader's guest wrote down."""
    if reason := why_not():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="fs-rdma-") as name:  # a short path: sockets are in it
        folder = Path(name)
        model = Model(Store(folder / "store"))
        about = {"checkpoint": model.checkpoint, "first_held": FIRST_HELD, "chunk_bytes": CHUNK_BYTES}
        (folder / "model.json").write_text(json.dumps(about))
        run_guests(folder, (HERE / "guests/holder.py", HERE / "guests/reader.py"), TIMEOUT_S)
        yield json.loads((folder / "results.json").read_text())


def of(findings: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = findings[name]
    assert "failed" not in found, found["failed"]
    return found


def test_the_guests_device_is_found_and_usable(findings: dict[str, Any]) -> None:
    assert findings["devices"] == [["rxe0", "ACTIVE", "Ethernet", ""]]


def test_our_reader_reads_a_region_from_pyverbs_bit_for_bit(findings: dict[str, Any]) -> None:
    found = of(findings, "ours_reads_pyverbs")
    assert (found["statuses"], found["requests"]) == (["ok"], list(range(CHUNKS)))
    assert found["right"] == found["right_checksums"] == CHUNKS
    assert found["peer"] == {"answered": CHUNKS}


def test_pyverbs_reads_a_registered_segment_from_our_server_bit_for_bit(findings: dict[str, Any]) -> None:
    """Of a pool's slabs, four of them; its second half is not there yet when it is asked for."""
    found = of(findings, "pyverbs_reads_ours")
    assert found["peer"] == {"parts": 4, "wrong": [], "chunks": CHUNKS}
    assert found["holder"] == {"reason": "closed"}


def test_chunks_that_are_not_ready_are_waited_for_and_others_are_refused(findings: dict[str, Any]) -> None:
    found = of(findings, "ours_reads_ours")
    assert (found["statuses"], found["right"], found["holder"]) == (["ok"], CHUNKS, {"reason": "closed"})
    assert found["some"] == ["ok", "not_ready", "refused"]


@pytest.mark.parametrize("end", ["killed", "silent"])
def test_a_reader_notices_the_end_of_its_holder_within_a_second(findings: dict[str, Any], end: str) -> None:
    found = of(findings, f"holder_is_{end}")
    assert (found["before"], found["after"]) == ("ok", "failed")
    assert found["noticed_s"] < PROMISE_S + SLACK_S, found


@pytest.mark.parametrize("end", ["killed", "silent"])
def test_a_holder_notices_the_end_of_its_reader_within_a_second(findings: dict[str, Any], end: str) -> None:
    found = of(findings, f"reader_is_{end}")
    assert found["first"] == "ok"
    assert found["noticed_s"] < PROMISE_S + SLACK_S, found
    reason = found["holder"]["reason"]
    assert reason == "closed" if end == "killed" else "nothing came from the peer" in reason


def test_a_fetch_that_began_by_rdma_goes_on_by_tcp_when_its_link_dies(findings: dict[str, Any]) -> None:
    """Two nodes as their daemons have them: what each offers, what came how, and nothing from the store."""
    found = of(findings, "goes_on_by_tcp")
    assert found["transports"] == [["rdma", "tcp"]] * 2
    assert found["right"]
    assert (found["error"], found["from_store_bytes"]) == ("None", 0)
    assert found["fetched"] == {"peer": MODEL_BYTES}
    assert (FIRST_HELD - 1) * CHUNK_BYTES <= found["by_rdma_bytes"] < MODEL_BYTES
    assert int(found["sent_bytes"]) >= found["by_rdma_bytes"], "the holder counts what it called ready"


def test_reads_over_a_link_that_loses_packets_are_right_or_end_with_an_error(findings: dict[str, Any]) -> None:
    """A lost packet is sent again, by the device; where it gives up, all that is outstanding fails, and TCP goes on."""
    found = of(findings, "loses_packets")
    assert found["lost"] > 0
    assert set(found["statuses"]) <= {"ok", "failed"}
    assert len(found["requests"]) == CHUNKS
    if found["statuses"] == ["ok"]:
        assert found["right"] == found["right_checksums"] == CHUNKS
    else:
        assert found["error"]


LIES = {
    "stranger": "NativeError: the peer does not speak this protocol",
    "closed": "NativeError: the peer closed the side channel",
    "half_open": "NativeError: the peer did not set the connection up in time",
    "version": "NativeError: the peer speaks version 2, this is version 1",
    "mtu": "NativeError: the peer's hello holds a value that is none",
    "many_parts": "NativeError: the peer's hello holds a value that is none",
    "overlap": "NativeError: the peer's parts overlap, or are none",
    "overflow": "NativeError: the peer's parts overlap, or are none",
    "unasked": "lost: the holder answered what nobody asked",
    "unknown": "lost: the holder answered what nobody asked",
}


def test_holders_that_lie_are_dropped_with_the_reason(findings: dict[str, Any]) -> None:
    found = of(findings, "holders_that_lie")
    assert {name: found[name] for name in LIES} == LIES


def test_a_reader_of_one_segment_cannot_read_another_by_its_keys_and_addresses(findings: dict[str, Any]) -> None:
    """Both are of one pool, and so in one protection domain; what keeps them apart are each connection's windows."""
    found = of(findings, "other_segments_are_out_of_reach")
    assert found["other"] == ["failed", "RDMA READ: remote access error"]
    assert (found["untouched"], found["own"], found["reason"]) == (True, ["ok"], "closed | closed")


def test_readers_that_lie_or_say_nothing_are_dropped_with_the_reason(findings: dict[str, Any]) -> None:
    lying, silent = of(findings, "readers_that_lie")["reason"].split(" | ")
    assert lying == "NativeError: the reader asked for bytes that there are not"
    assert silent == "NativeError: the peer did not set the connection up in time"


def test_a_reader_is_cut_off_when_its_grant_ends(findings: dict[str, Any]) -> None:
    found = of(findings, "a_grant_ends_what_it_began")
    assert found["reason"] == "expired | expired"
    assert all(found["errors"])


def test_slabs_of_the_pool_are_registered_once_for_all_segments_that_use_them(findings: dict[str, Any]) -> None:
    found = of(findings, "slabs_stay_registered")
    assert found["has_windows"]
    assert found["registered"] == [SLABS * SLAB_BYTES] * 4 + [0]


def test_memory_is_registered_once_and_within_its_region(findings: dict[str, Any]) -> None:
    assert of(findings, "bad_arguments_are_refused")["errors"] == ["ValueError", "IndexError"]
