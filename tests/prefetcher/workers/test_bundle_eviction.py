from __future__ import annotations

import asyncio
import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from fleetstart.prefetcher.layers.bundle_eviction import UNUSED_S, UnpackedBundle, bundles_to_evict
from fleetstart.prefetcher.sources.folder import FolderSource
from fleetstart.prefetcher.workers.bundles import BundleCache
from fleetstart.runtime.contract.ids import BundleId

NOW = 10_000_000.0
BUNDLES = st.lists(
    st.builds(
        lambda size, age, used: (size, age, used), st.integers(0, 1_000), st.floats(0, 2 * UNUSED_S), st.booleans()
    ),
    max_size=20,
)


def bundles_of(drawn: list[tuple[int, float, bool]]) -> list[UnpackedBundle]:
    return [
        UnpackedBundle(bundle=BundleId(str(number)), size_bytes=size, used_unix_s=NOW - age, in_use=used)
        for number, (size, age, used) in enumerate(drawn)
    ]


@given(BUNDLES, st.integers(0, 5_000))
def test_none_in_use_leaves_and_the_limit_holds_for_the_others(
    drawn: list[tuple[int, float, bool]], limit: int
) -> None:
    there = bundles_of(drawn)
    gone = bundles_to_evict(there, NOW, limit)
    left = [one for one in there if one.bundle not in gone]
    assert all(one in left for one in there if one.in_use)
    idle = [one for one in left if not one.in_use]
    assert sum(one.size_bytes for one in left) <= limit or not idle
    assert all(NOW - one.used_unix_s < UNUSED_S for one in idle)
    if idle and gone:
        newest_gone = max(one.used_unix_s for one in there if one.bundle in gone)
        assert newest_gone <= min(one.used_unix_s for one in idle), "the longest unused leave first"


def place(tmp_path: Path, bundle: BundleId) -> Path:
    return tmp_path / "bundles" / f"{bundle}.v2"


def there_of(tmp_path: Path, names: list[BundleId]) -> set[BundleId]:
    return {name for name in names if place(tmp_path, name).exists()}


def test_unused_bundles_leave_the_disk_by_age_and_size(tmp_path: Path) -> None:
    async def scenario() -> None:
        used: set[BundleId] = set()
        cache = BundleCache(
            folder=tmp_path / "bundles", source=FolderSource(tmp_path), in_use=lambda: used, limit_bytes=100_000
        )
        names = [BundleId(str(number) * 64) for number in range(1, 5)]
        for number, name in enumerate(names):
            folder = place(tmp_path, name)
            (folder / "files").mkdir(parents=True)
            (folder / "files" / "handler.py").write_bytes(b"x" * 40_000)
            os.utime(folder, (NOW + number, NOW + number))
        used.add(names[0])
        await cache.evict(NOW + 10)
        assert there_of(tmp_path, names) == {names[0], names[3]}
        assert cache.ready(names[1]) is None
        assert cache.ready(names[3]) is not None
        await cache.evict(os.stat(place(tmp_path, names[3])).st_mtime + UNUSED_S + 1)
        assert list((tmp_path / "bundles").iterdir()) == [place(tmp_path, names[0])]

    asyncio.run(scenario())


def test_a_bundle_that_a_start_takes_while_others_leave_stays(tmp_path: Path) -> None:
    names = [BundleId(str(number) * 64) for number in range(1, 5)]

    async def scenario() -> None:
        used: set[BundleId] = set()
        cache = BundleCache(
            folder=tmp_path / "bundles", source=FolderSource(tmp_path), in_use=lambda: used, limit_bytes=50_000
        )
        for name in names:
            (place(tmp_path, name) / "files").mkdir(parents=True)
            (place(tmp_path, name) / "files" / "handler.py").write_bytes(b"x" * 40_000)
        evicting = asyncio.create_task(cache.evict(NOW))
        there = set(names)
        while len(there) == len(names):
            assert not evicting.done()
            await asyncio.sleep(0)
            there = there_of(tmp_path, names)
        used |= there
        taken = [cache.ready(name) for name in there]
        await evicting
        assert taken
        assert all(folder is not None and folder.is_dir() for folder in taken)
        assert there_of(tmp_path, names) == there

    asyncio.run(scenario())
