"""Throughput measurements on real memory, a real disk and a real S3 server. They leave nothing behind; no rates are
asserted."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from fleetstart.prefetcher.diagnostics.rounds import Rounds
from fleetstart.prefetcher.diagnostics.throughput import Scope, measure
from fleetstart.prefetcher.sources.errors import SourceError
from fleetstart.runtime.contract.node.throughput import Ceilings
from fleetstart.runtime.contract.sizes import MIB
from tests.prefetcher.nodes import S3Server, Store
from tests.servers import shared_memory

SMALL = Scope(memory_bytes=32 * MIB, disk_bytes=32 * MIB, store_least_bytes=4 * MIB, rounds=2)
BUCKET = "s3://weights"


@pytest.fixture
def s3(s3_server: S3Server, aws: None, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.url)
    return s3_server


def test_memory_and_disk_are_measured_and_nothing_stays(tmp_path: Path) -> None:
    gc.collect()  # what tests before left open must not be closed meanwhile
    shared, descriptors = shared_memory(), len(os.listdir("/proc/self/fd"))
    found = measure(tmp_path / "not" / "yet", str(tmp_path / "store"), SMALL)
    assert set(found.bytes_per_s) == {"prefault", "checksum", "disk", "store"}
    assert all(rate > 0 for rate in found.bytes_per_s.values())
    assert set(found.measured) == set(found.bytes_per_s)
    assert found.left_out == found.failed == {}
    assert found.measured["disk"].startswith(f"{tmp_path}, ")
    assert "disk of FS_HOME" in found.measured["store"]
    assert found.bytes_per_s["store"] == found.bytes_per_s["disk"]
    assert list(tmp_path.iterdir()) == []
    assert shared_memory() == shared
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.slow
def test_pages_are_those_that_a_node_would_get_and_the_others_were_refused_for_a_reason(tmp_path: Path) -> None:
    found = measure(tmp_path, str(tmp_path), SMALL)
    better = ("hugetlb", "thp", "small")[: ("hugetlb", "thp", "small").index(found.pages)]
    assert tuple(found.refused) == better
    assert all(found.refused.values())
    assert measure(tmp_path, str(tmp_path), Scope(memory_bytes=32 * MIB, rounds=1, kinds=["small"])).pages == "small"


def test_a_disk_that_takes_no_file_is_a_sentence(tmp_path: Path) -> None:
    found = measure(Path("/proc/sys"), str(tmp_path), SMALL)
    assert "disk" not in found.bytes_per_s
    assert found.failed["disk"]
    assert found.bytes_per_s["store"] > 0  # a folder on another disk is measured there
    assert found.measured["store"].startswith(f"{tmp_path}, ")


def test_a_disk_with_too_little_room_is_a_sentence(tmp_path: Path) -> None:
    found = measure(tmp_path, str(tmp_path / "store"), Scope(memory_bytes=32 * MIB, disk_bytes=MIB, rounds=1))
    assert "too little room" in found.failed["disk"]
    assert "too little room" in found.failed["store"]


def test_a_bucket_is_read_from_its_largest_part(s3: S3Server, store: Store, tmp_path: Path) -> None:
    store.put_checkpoint(os.urandom(MIB))
    large = store.put_checkpoint(os.urandom(9 * MIB + 17), os.urandom(100))
    found = measure(tmp_path, BUCKET, SMALL)
    assert found.bytes_per_s["store"] > 0
    assert "connections" in found.measured["store"]
    keys = {line.split("?")[0] for line in s3.log().splitlines() if "part-" in line}
    assert all(f"checkpoints/{large}/part-00000" in key for key in keys)


def test_a_bucket_with_nothing_to_read_is_left_out(s3: S3Server, store: Store, tmp_path: Path) -> None:
    assert "no checkpoint to read" in measure(tmp_path, BUCKET, SMALL).left_out["store"]
    store.put_checkpoint(bytes(1000))
    assert "bytes in one part to read" in measure(tmp_path, BUCKET, SMALL).left_out["store"]


def test_a_store_that_does_not_answer_or_does_not_let_us_in_has_failed(
    s3: S3Server, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_checkpoint(os.urandom(9 * MIB))
    assert "cannot be read" in measure(tmp_path, "s3://elsewhere", SMALL).failed["store"]
    s3.kill()
    assert "cannot be read" in measure(tmp_path, BUCKET, SMALL).failed["store"]
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "credentials" in measure(tmp_path, BUCKET, SMALL).failed["store"]


def test_as_a_process_it_answers_in_json(tmp_path: Path) -> None:
    options = ("--home", str(tmp_path), "--store", str(tmp_path), "--bytes", str(32 * MIB))
    process = subprocess.run(
        [sys.executable, "-P", "-m", "fleetstart.prefetcher.diagnostics.throughput", *options],
        capture_output=True,
        check=True,
    )
    assert msgspec.json.decode(process.stdout, type=Ceilings).bytes_per_s["disk"] > 0
    assert process.stderr == b""


# ── rounds ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_round_takes_each_piece_once_and_its_threads_work_at_the_same_time() -> None:
    together = threading.Barrier(4, timeout=10)
    taken: list[int] = []

    def take(number: int, stopped: Callable[[], bool]) -> int:
        together.wait()
        taken.append(number)
        return 1000

    assert Rounds(8, take).run(4, 60.0) > 0
    assert sorted(taken) == list(range(8))


def test_a_round_that_time_ends_is_gone_on_with_by_the_next() -> None:
    taken: list[int] = []

    def take(number: int, stopped: Callable[[], bool]) -> int:
        taken.append(number)
        while not stopped():
            pass
        return 1

    rounds = Rounds(3, take)
    while len(taken) < 5:
        rounds.run(1, 1e-3)
    assert taken == [0, 1, 2, 0, 1]


def test_an_error_of_one_piece_is_the_rounds_error() -> None:
    def take(number: int, stopped: Callable[[], bool]) -> int:
        raise SourceError(f"piece {number}")

    with pytest.raises(SourceError, match="piece"):
        Rounds(4, take).run(2, 60.0)


def test_no_time_is_no_bytes() -> None:
    assert Rounds(4, lambda number, stopped: 1).run(2, 0.0) == 0
