"""Space on the disk that the cache takes: promised once, and given back when a checkpoint cannot be written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from fleetstart import native
from fleetstart.prefetcher.segments import disk_cache
from fleetstart.prefetcher.segments.disk_cache import DiskCache
from fleetstart.prefetcher.segments.disk_image import DiskImage
from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.contract.weights.manifest import chunk_ranges, read_manifest
from tests.prefetcher.nodes import CHUNK_BYTES, Store
from tests.servers import wait_until

GIB = 1 << 30


@pytest.fixture(autouse=True)
def small_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "RESERVE_BYTES", 0)


class Kept:
    """A checkpoint that the cache has an image of, its memory as after a fetch, and what fetched it."""

    def __init__(self, tier: DiskCache, store: Store, chunks: int = 8) -> None:
        data = os.urandom(chunks * CHUNK_BYTES)
        self.tier = tier
        self.checkpoint = store.put_checkpoint(data)
        self._encoded = store.path(f"checkpoints/{self.checkpoint}/manifest.json").read_bytes()
        self.manifest = read_manifest(self._encoded, self.checkpoint)
        slab_bytes = 1 << (len(data) - 1).bit_length()
        self.region = native.SlabPool("test", pages="small", slab_bytes=slab_bytes, capacity=1).take(slab_bytes)
        self.region.view(0, len(data))[:] = data

    def keep(self, in_use: set[CheckpointId] | None = None) -> DiskImage | None:
        self.tier.keep(self.checkpoint, self.manifest, self._encoded, in_use or set())
        return self.tier.image(self.checkpoint)

    def write(self, image: DiskImage) -> None:
        for chunk in chunk_ranges(self.manifest):
            self.tier.write_behind(image, chunk, self.region)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return self.tier.ranges().get(self.checkpoint, [])


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


@pytest.mark.parametrize("mounted", [("tmpfs", "size=1m")], indirect=True)
def test_after_a_full_disk_its_space_is_there_again_and_the_next_fetch_is_kept(store: Store, mounted: Path) -> None:
    tier = DiskCache(mounted / "tier", GIB)
    kept, before_bytes = Kept(tier, store), free_bytes(mounted)
    first = kept.keep()
    assert first is not None
    (mounted / "others").write_bytes(bytes(before_bytes - 5 * CHUNK_BYTES))
    full_bytes = free_bytes(mounted)

    kept.write(first)
    wait_until(lambda: tier.image(kept.checkpoint) is None, what="the writer to notice")

    wait_until(lambda: not list((mounted / "tier").iterdir()), what="nothing left of it")
    assert free_bytes(mounted) > full_bytes, "also while a fetch has the image open"
    assert (tier.used_bytes, kept.ranges, tier.manifest(kept.checkpoint)) == (0, [], None)
    (mounted / "others").unlink()
    assert free_bytes(mounted) == before_bytes
    second = kept.keep()
    assert second is not None
    kept.write(first)
    kept.write(second)
    wait_until(lambda: kept.ranges == [(0, 8)], what="all chunks on the disk")
    tier.close()


@pytest.mark.parametrize("mounted", [("tmpfs", "size=1m")], indirect=True)
def test_the_space_of_an_image_is_there_again_while_a_segment_has_it_open(store: Store, mounted: Path) -> None:
    tier = DiskCache(mounted / "tier", GIB)
    kept, before_bytes = Kept(tier, store), free_bytes(mounted)
    image = kept.keep()
    assert image is not None
    kept.write(image)
    wait_until(lambda: kept.ranges == [(0, 8)], what="all chunks on the disk")

    tier.drop(kept.checkpoint)

    assert free_bytes(mounted) == before_bytes
    assert not image.present(chunk_ranges(kept.manifest))
    tier.close()


@pytest.mark.parametrize("mounted", [("tmpfs", "size=1m")], indirect=True)
def test_two_fetches_at_a_time_are_not_promised_the_same_space(store: Store, mounted: Path) -> None:
    """Bytes that are not written yet take no space, and will."""
    tier = DiskCache(mounted / "tier", GIB)
    one, two = Kept(tier, store, 9), Kept(tier, store, 9)
    first = one.keep()
    assert first is not None
    assert two.keep({one.checkpoint}) is None
    one.write(first)
    wait_until(lambda: one.ranges == [(0, 9)], what="all chunks on the disk")
    assert two.keep({one.checkpoint}) is None
    assert two.keep() is not None, "the one that is not in use gives way"
    assert one.ranges == []
    tier.close()
