"""Trees that come about on a node while it fetches the same ones: the node has them once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from fleetstart.prefetcher.layers.cache import LayerCache
from fleetstart.prefetcher.sources.base import ObjectRange
from fleetstart.prefetcher.sources.folder import FolderSource
from fleetstart.runtime.contract.function.layer import MANIFEST_OBJECT, read_layer
from fleetstart.runtime.contract.ids import WorkerId
from tests.prefetcher.layer_store import put_layer
from tests.prefetcher.nodes import Store

ONE, TWO = WorkerId("w-1"), WorkerId("w-2")
FILES = {"state.py": b"x" * 50_000}


class HeldSource(FolderSource):
    """A folder whose parts are read once `go` is set; `asked` is set when the first one is asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked, self.go = threading.Event(), threading.Event()

    def read(self, asked: ObjectRange, stopped: Callable[[], bool]) -> Iterator[int]:
        self.asked.set()
        assert self.go.wait(20)
        return super().read(asked, stopped)


def test_a_tree_that_is_adopted_while_it_is_fetched_is_there_for_all(store: Store, tmp_path: Path) -> None:
    layer = put_layer(store, FILES)
    data = (store.folder / f"layers/{layer}/{MANIFEST_OBJECT}").read_bytes()
    source = HeldSource(store.folder)

    async def scenario() -> None:
        cache = LayerCache(folder=tmp_path / "layers", source=source, budget_bytes=200_000)
        fetched = asyncio.create_task(cache.acquire(layer, ONE))
        assert await asyncio.to_thread(source.asked.wait, 20)
        staging = await cache.stage(50_000)
        (cache.files_of(staging) / "state.py").write_bytes(FILES["state.py"])
        await cache.adopt(staging, layer, read_layer(data, layer), data, TWO)
        source.go.set()
        folder = Path(await fetched)
        assert (folder / "state.py").read_bytes() == FILES["state.py"]
        assert cache.used_bytes == 50_000
        cache.release(layer, ONE)
        await cache.unstage(await cache.stage(150_000))
        assert cache.has(layer), "another worker's, who adopted it"

    asyncio.run(scenario())
    assert [path.name for path in (tmp_path / "layers").iterdir()] == [layer]


def test_a_fetch_that_cannot_be_kept_fails(store: Store, tmp_path: Path) -> None:
    layer = put_layer(store, FILES)
    source = HeldSource(store.folder)

    async def scenario() -> None:
        cache = LayerCache(folder=tmp_path / "layers", source=source, budget_bytes=200_000)
        fetched = asyncio.create_task(cache.acquire(layer, ONE))
        assert await asyncio.to_thread(source.asked.wait, 20)
        (tmp_path / "layers" / layer).write_bytes(b"in its place")
        source.go.set()
        (error,) = await asyncio.gather(fetched, return_exceptions=True)
        assert isinstance(error, NotADirectoryError)
        assert not cache.has(layer)

    asyncio.run(scenario())
