"""Measurements of a node when it comes up: bounded, by the clock, and left out where it cannot be."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fleetstart.prefetcher.diagnostics.startup import LIMIT_S, measure_link, measure_machine, rate_of
from fleetstart.prefetcher.sources.base import ObjectRange
from fleetstart.prefetcher.sources.errors import ReadCancelled
from fleetstart.prefetcher.sources.folder import FolderSource
from fleetstart.runtime.contract.object_keys import LINK_PROBE, LINK_PROBE_BYTES
from fleetstart.runtime.contract.sizes import MIB
from tests.prefetcher.nodes import Store


class SlowSource(FolderSource):
    """A folder behind a link of a certain rate."""

    def __init__(self, folder: Path, bytes_per_s: float) -> None:
        super().__init__(folder)
        self.begun_s = time.monotonic()
        self.size_bytes = 0
        self._bytes_per_s = bytes_per_s

    def read(self, asked: ObjectRange, stopped: Callable[[], bool]) -> Iterator[int]:
        for checksum, piece in zip(super().read(asked, stopped), asked.pieces, strict=True):
            self.size_bytes += piece.size_bytes
            while time.monotonic() < self.begun_s + self.size_bytes / self._bytes_per_s:
                if stopped():
                    raise ReadCancelled(asked.key)
                time.sleep(0.001)
            yield checksum


@pytest.mark.parametrize("rate", [3.0 * MIB, 25.0 * MIB])
def test_a_link_is_measured_within_its_bounds(store: Store, rate: float) -> None:
    store.put(LINK_PROBE, bytes(LINK_PROBE_BYTES))
    source = SlowSource(store.folder, rate)
    found = measure_link(source)
    assert time.monotonic() - source.begun_s < LIMIT_S + 1
    assert source.size_bytes <= LINK_PROBE_BYTES
    assert rate / 2 < found < rate * 2


def test_a_link_to_a_store_without_the_object_is_not_known(store: Store) -> None:
    assert measure_link(FolderSource(store.folder)) == 0.0
    store.put(LINK_PROBE, b"short")
    assert measure_link(FolderSource(store.folder)) == 0.0


def test_disk_and_memory_are_measured_and_a_folder_is_the_disk(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    found = measure_machine(tmp_path, str(tmp_path / "store"))
    assert found["store"] == found["disk"] > MIB
    assert found["memory"] > 100 * MIB
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]
    assert set(measure_machine(tmp_path / "missing", "s3://bucket")) == {"memory"}


def test_the_first_piece_only_starts_the_clock() -> None:
    assert rate_of([(10.0, 5), (12.0, 5), (11.0, 5)]) == 5.0
    assert rate_of([(10.0, 5)]) == 0.0
