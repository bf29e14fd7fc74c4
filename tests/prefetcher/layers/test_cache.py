"""The layers on a node's disk: whole or not there, fetched once, kept while used, evicted when room is needed."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest

from fleetstart.prefetcher.layers.cache import LayerCache
from fleetstart.prefetcher.sources.base import Source
from fleetstart.prefetcher.sources.folder import FolderSource
from fleetstart.runtime.contract.errors import (
    ChecksumMismatch,
    FleetError,
    InvalidSpec,
    LayerInvalid,
    StartFailed,
    Unavailable,
)
from fleetstart.runtime.contract.ids import LayerId, WorkerId
from tests.prefetcher.layer_store import CHUNK, put_layer
from tests.prefetcher.nodes import Store

ONE, TWO = WorkerId("w-1"), WorkerId("w-2")
FILES = {
    "empty/__init__.py": b"",
    "pkg/__init__.py": b"x = 1\n",
    "pkg/data/big.bin": os.urandom(5 * CHUNK + 17),
    "pkg/run": b"#!/bin/sh\n",
    "six.py": b"y = 2\n" * 3000,
}


def cache_of(folder: Path, source: Source, budget_bytes: int = 1 << 30) -> LayerCache:
    return LayerCache(folder=folder / "layers", source=source, budget_bytes=budget_bytes)


def contents(folder: str) -> dict[str, bytes]:
    root = Path(folder)
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def refused(store: Store, folder: Path, layer: LayerId, budget_bytes: int = 1 << 30) -> FleetError:
    """The error of a fetch that must not leave anything behind."""
    cache = cache_of(folder, FolderSource(store.folder), budget_bytes)
    with pytest.raises(FleetError) as caught:
        asyncio.run(cache.acquire(layer, ONE))
    assert list((folder / "layers").iterdir()) == []
    assert cache.used_bytes == 0
    return caught.value


def test_a_layer_is_fetched_whole_from_any_source(source: Source, store: Store, tmp_path: Path) -> None:
    layer = put_layer(store, FILES)
    folder = asyncio.run(cache_of(tmp_path, source).acquire(layer, ONE))
    assert contents(folder) == FILES
    assert os.access(Path(folder, "pkg/run"), os.X_OK)
    assert not Path(folder, "six.py").stat().st_mode & 0o111
    assert [path.name for path in (tmp_path / "layers").iterdir()] == [layer]


def test_a_layer_without_files_is_an_empty_folder(store: Store, tmp_path: Path) -> None:
    folder = asyncio.run(cache_of(tmp_path, FolderSource(store.folder)).acquire(put_layer(store, {}), ONE))
    assert contents(folder) == {}


def test_callers_at_a_time_share_one_fetch(store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layer = put_layer(store, FILES)
    caplog.set_level(logging.INFO)

    async def scenario() -> set[str]:
        cache = cache_of(tmp_path, FolderSource(store.folder))
        return set(await asyncio.gather(*(cache.acquire(layer, WorkerId(f"w-{number}")) for number in range(8))))

    assert len(asyncio.run(scenario())) == 1
    assert [record.message for record in caplog.records].count("layer fetched") == 1


def test_a_layer_of_an_earlier_daemon_needs_no_store_and_half_of_one_is_removed(store: Store, tmp_path: Path) -> None:
    layer = put_layer(store, FILES)
    asyncio.run(cache_of(tmp_path, FolderSource(store.folder)).acquire(layer, ONE))
    (tmp_path / "layers" / ".new-12" / "files").mkdir(parents=True)
    (tmp_path / "layers" / ("0" * 64)).mkdir()
    cache = cache_of(tmp_path, FolderSource(tmp_path / "no-store"))
    assert cache.has(layer)
    assert contents(asyncio.run(cache.acquire(layer, ONE))) == FILES
    assert [path.name for path in (tmp_path / "layers").iterdir()] == [layer]


def test_a_file_that_a_crash_of_the_machine_cut_is_noticed_after_the_boot(store: Store, tmp_path: Path) -> None:
    layer = put_layer(store, FILES)
    folder = Path(asyncio.run(cache_of(tmp_path, FolderSource(store.folder)).acquire(layer, ONE)))
    boot = folder.parent / "boot"
    boot.write_text("an earlier one")
    assert cache_of(tmp_path, FolderSource(store.folder)).has(layer)
    assert boot.read_text() != "an earlier one"
    boot.write_text("an earlier one")
    (folder / "six.py").write_bytes(b"")
    cache = cache_of(tmp_path, FolderSource(store.folder))
    assert not cache.has(layer)
    assert contents(asyncio.run(cache.acquire(layer, ONE))) == FILES


def test_a_damaged_chunk_is_named_and_leaves_nothing(store: Store, tmp_path: Path) -> None:
    layer = put_layer(store, FILES)
    part = store.path(f"layers/{layer}/part-00001")
    data = bytearray(part.read_bytes())
    data[CHUNK + 5] ^= 1
    part.write_bytes(data)
    error = refused(store, tmp_path, layer)
    assert isinstance(error, ChecksumMismatch)
    assert "chunk 3 " in error.message
    assert "part-00001" in error.message


def test_a_chunk_that_somebody_replaced_is_found_though_its_checksum_fits(store: Store, tmp_path: Path) -> None:
    layer = put_layer(store, FILES, digests=["0" * 64] * 10)
    error = refused(store, tmp_path, layer)
    assert isinstance(error, ChecksumMismatch)
    assert "is not the one that was published" in error.message


def test_a_layer_from_before_there_were_digests_is_taken(store: Store, tmp_path: Path) -> None:
    layer = put_layer(store, FILES, digests=[])
    assert contents(asyncio.run(cache_of(tmp_path, FolderSource(store.folder)).acquire(layer, ONE))) == FILES


def test_a_missing_or_cut_part_is_named(store: Store, tmp_path: Path) -> None:
    layer = put_layer(store, FILES)
    part = store.path(f"layers/{layer}/part-00001")
    part.write_bytes(part.read_bytes()[:-1])
    assert isinstance(refused(store, tmp_path, layer), LayerInvalid)
    part.unlink()
    assert "part-00001 is not in the store" in refused(store, tmp_path, layer).message


def test_a_layer_for_another_python_is_refused_by_name(store: Store, tmp_path: Path) -> None:
    error = refused(store, tmp_path, put_layer(store, FILES, python="cpython-27"))
    assert isinstance(error, StartFailed)
    assert "cpython-27" in error.message


def test_what_is_no_layer_is_refused(store: Store, tmp_path: Path) -> None:
    assert isinstance(refused(store, tmp_path, LayerId("../../etc")), InvalidSpec)
    assert isinstance(refused(store, tmp_path, LayerId("0" * 64)), LayerInvalid)


def test_an_unused_layer_leaves_for_another_and_a_used_one_stays(store: Store, tmp_path: Path) -> None:
    layers = [put_layer(store, {f"m{number}.py": bytes([number]) * 10_000}) for number in range(3)]

    async def scenario() -> None:
        cache = cache_of(tmp_path, FolderSource(store.folder), budget_bytes=25_000)
        await cache.acquire(layers[0], ONE)
        await cache.acquire(layers[1], TWO)
        with pytest.raises(Unavailable, match="5,000 for layers"):
            await cache.acquire(layers[2], ONE)
        cache.release(layers[1], TWO)
        await cache.acquire(layers[2], TWO)
        assert [cache.has(layer) for layer in layers] == [True, False, True]
        assert cache.used_bytes == 20_000

    asyncio.run(scenario())
    assert sorted(path.name for path in (tmp_path / "layers").iterdir()) == sorted([layers[0], layers[2]])


def test_a_caller_that_gives_up_leaves_the_fetch_to_others(store: Store, tmp_path: Path) -> None:
    layer = put_layer(store, FILES)

    async def scenario() -> None:
        cache = cache_of(tmp_path, FolderSource(store.folder))
        first = asyncio.create_task(cache.acquire(layer, ONE))
        second = asyncio.create_task(cache.acquire(layer, TWO))
        await asyncio.sleep(0)
        first.cancel()
        assert contents(await second) == FILES

    asyncio.run(scenario())
