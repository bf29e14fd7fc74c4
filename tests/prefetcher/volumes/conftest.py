from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from fleetstart.prefetcher.sources.base import Source
from fleetstart.prefetcher.sources.folder import FolderSource
from fleetstart.prefetcher.volumes.store_writer import BucketWriter, FolderWriter
from tests.prefetcher.nodes import Store
from tests.prefetcher.volumes.bench import Bench
from tests.servers import RedisServer


@pytest.fixture(autouse=True)
def _scratch(redis_server: RedisServer, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of the test's own for a worker's copies, which end with its namespace elsewhere. Servers start first:
    the paths of their sockets would be too long in it."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))


@pytest.fixture
def bench(source: Source, store: Store, redis_server: RedisServer, tmp_path: Path) -> Bench:
    writer = FolderWriter(store.folder) if isinstance(source, FolderSource) else BucketWriter("weights", "")
    return Bench(source, writer, redis_server, tmp_path)


@pytest.fixture
def folder_bench(store: Store, redis_server: RedisServer, tmp_path: Path) -> Bench:
    return Bench(FolderSource(store.folder), FolderWriter(store.folder), redis_server, tmp_path)
