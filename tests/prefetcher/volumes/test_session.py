"""Commits and reloads: the handler's API on one end of the stream, the node with its store and Redis on the other."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
from pathlib import Path

import msgspec
import pytest

from fleetstart.prefetcher.layers.cache import LayerCache
from fleetstart.prefetcher.layers.kinds import VOLUME
from fleetstart.prefetcher.sources.base import Source
from fleetstart.prefetcher.volumes.store_writer import FolderWriter
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.function.volume import MountedVolume
from fleetstart.runtime.contract.ids import LayerId
from fleetstart.runtime.contract.node.volume_stream import (
    Commit,
    Done,
    End,
    FileHead,
    Message,
    StreamClosed,
    VolumeStream,
)
from fleetstart.runtime.sdk import volumes as sdk
from fleetstart.runtime.sdk.volumes import VolumeConflict, VolumeError, volume
from tests.prefetcher.nodes import Store
from tests.prefetcher.volumes.bench import ONE, TWO, Bench, contents, run, write
from tests.servers import wait_until


def test_commits_are_versions_that_any_node_can_fetch_and_only_what_is_new_is_stored(
    bench: Bench, source: Source, tmp_path: Path
) -> None:
    large = os.urandom(5 << 20)

    async def scenario() -> None:
        async with bench.worker() as one:
            assert contents(one.path) == {}
            assert await asyncio.to_thread(write, one, {"a/large": large, "b": b"1"}) == 1
            assert await asyncio.to_thread(write, one, {"b": b"2", "c": b""}) == 2
            assert contents(one.path) == {"a/large": large, "b": b"2", "c": b""}
        async with bench.worker(TWO) as two:
            assert two.version == 2
            assert contents(two.path) == {"a/large": large, "b": b"2", "c": b""}
        fresh = LayerCache(folder=tmp_path / "other", source=source, budget_bytes=1 << 30, kind=VOLUME)
        versions = bench.record.versions
        assert contents(Path(await fresh.acquire(versions[0].tree, ONE))) == {"a/large": large, "b": b"1"}
        assert contents(Path(await fresh.acquire(versions[1].tree, ONE))) == {"a/large": large, "b": b"2", "c": b""}

    run(bench, scenario)
    first, second = bench.record.versions
    assert (first.new_bytes, second.new_bytes) == (len(large) + 1, 1)
    assert (first.created_by, first.files, second.files) == ("writes", 2, 3)
    wait_until(lambda: not bench.staged(), what="an empty staging")


def test_the_same_files_again_make_no_version(folder_bench: Bench) -> None:
    async def scenario() -> None:
        async with folder_bench.worker() as one:
            assert await asyncio.to_thread(write, one, {"a": b"1"}) == 1
            assert await asyncio.to_thread(write, one, {"a": b"1"}) == 1

    run(folder_bench, scenario)
    assert len(folder_bench.record.versions) == 1
    wait_until(lambda: not folder_bench.staged(), what="an empty staging")


def test_two_workers_conflict_and_a_reload_solves_it(folder_bench: Bench) -> None:
    async def scenario() -> None:
        async with folder_bench.worker(ONE) as one, folder_bench.worker(TWO) as two:
            assert await asyncio.to_thread(write, one, {"one": b"1"}) == 1
            with pytest.raises(VolumeConflict, match="version 1 is the newest"):
                await asyncio.to_thread(write, two, {"two": b"2"})
            assert contents(two.path) == {}
            assert await asyncio.to_thread(two.reload) == 1
            assert contents(two.path) == {"one": b"1"}
            assert await asyncio.to_thread(write, two, {"two": b"2"}) == 2
            assert await asyncio.to_thread(two.reload) == 2

    run(folder_bench, scenario)
    wait_until(lambda: not folder_bench.staged(), what="an empty staging")


def test_a_worker_that_ends_in_the_middle_changes_nothing(folder_bench: Bench, store: Store) -> None:
    async def scenario() -> None:
        async with folder_bench.stream() as sock:
            stream = VolumeStream(sock)
            stream.send(Commit("index", 2, 1000))
            stream.send(FileHead("a", 500))
            stream.send_data(b"x" * 100)
            while not folder_bench.staged():
                await asyncio.sleep(0.01)
        while folder_bench.staged():
            await asyncio.sleep(0.01)

    run(folder_bench, scenario)
    assert folder_bench.record.versions == []
    assert not store.path("parts").exists()


def test_a_worker_that_ends_before_its_version_is_published_changes_nothing(folder_bench: Bench) -> None:
    """It has sent everything, and is gone while its files are stored."""
    writing, gone = asyncio.Event(), asyncio.Event()
    loop: list[asyncio.AbstractEventLoop] = []

    class Slow(FolderWriter):
        def put(self, key: str, data: bytes) -> None:
            loop[0].call_soon_threadsafe(writing.set)
            asyncio.run_coroutine_threadsafe(gone.wait(), loop[0]).result(20)
            super().put(key, data)

    slow = Slow(folder_bench.folder.parent / "buckets" / "weights")
    folder_bench.node = dataclasses.replace(folder_bench.node, writer=slow)

    async def scenario() -> None:
        loop.append(asyncio.get_running_loop())
        async with folder_bench.stream() as sock:
            stream = VolumeStream(sock)
            stream.send(Commit("index", 1, 3))
            stream.send(FileHead("a", 3))
            stream.send_data(b"abc")
            stream.send(End())
            await writing.wait()
            stream.close()  # as a killed process does
            gone.set()
            while folder_bench.staged():
                await asyncio.sleep(0.01)

    run(folder_bench, scenario)
    assert folder_bench.record.versions == []


HOSTILE: dict[str, tuple[str, int, int, list[Message | bytes], str]] = {
    "out": ("index", 1, 1, [FileHead("../x", 1), b"x"], "not allowed"),
    "absolute": ("index", 1, 1, [FileHead("/etc/x", 1), b"x"], "not allowed"),
    "twice": ("index", 2, 2, [FileHead("a", 1), b"x", FileHead("a", 1), b"y"], "named twice"),
    "huge": ("index", 1, 1 << 50, [], "at most"),
    "many": ("index", 1 << 30, 1, [], "at most"),
    "more": ("index", 1, 1, [FileHead("a", 1 << 40), b"x"], "more came"),
    "other": ("secret", 1, 1, [FileHead("a", 1), b"x"], "not among those"),
    "no room": ("index", 1, 2 << 30, [], "FS_VOLUME_CACHE"),
    "beyond its memory": ("index", 1, 5 << 30, [], "raise memory"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_commit_is_refused_and_the_next_one_is_taken(folder_bench: Bench, case: str, tmp_path: Path) -> None:
    name, files, size_bytes, frames, said = HOSTILE[case]

    async def scenario() -> None:
        async with folder_bench.stream() as sock:
            stream = VolumeStream(sock)
            stream.send(Commit(name, files, size_bytes))
            for frame in frames:
                stream.send_data(frame) if isinstance(frame, bytes) else stream.send(frame)
            stream.send(End())
            answer = await asyncio.to_thread(stream.receive)
            assert isinstance(answer, Done)
            assert answer.error is not None
            assert said in f"{answer.error.message} {answer.error.hint}"
            assert await asyncio.to_thread(write, volume("index"), {"fine": b"1"}) == 1

    run(folder_bench, scenario)
    wait_until(lambda: not folder_bench.staged(), what="an empty staging")
    assert not list(tmp_path.rglob("x"))
    assert [one.number for one in folder_bench.record.versions] == [1]


def test_links_out_of_the_copy_and_pipes_are_refused_where_they_are(folder_bench: Bench) -> None:
    async def scenario() -> None:
        async with folder_bench.worker() as one:
            with one.writable() as folder:
                (folder / "link").symlink_to("/etc/passwd")
                with pytest.raises(VolumeError, match="link is a link out of the folder"):
                    await asyncio.to_thread(one.commit)
                (folder / "link").unlink()
                os.mkfifo(folder / "pipe")
                with pytest.raises(VolumeError, match="pipe is no file"):
                    await asyncio.to_thread(one.commit)
                (folder / "pipe").unlink()
                with (folder / "sparse").open("wb") as sparse:
                    sparse.truncate(1 << 40)
                with pytest.raises(VolumeError, match="at most"):
                    await asyncio.to_thread(one.commit)
            assert await asyncio.to_thread(write, one, {"fine": b"1"}) == 1

    run(folder_bench, scenario)


def test_a_volume_is_written_by_one_call_at_a_time_and_a_commit_belongs_inside(folder_bench: Bench) -> None:
    async def scenario() -> None:
        async with folder_bench.worker() as one:
            with pytest.raises(VolumeError, match="belongs inside"):
                one.commit()
            with one.writable() as folder:
                (folder / "dropped").write_bytes(b"x")
                with pytest.raises(VolumeError, match="concurrency=1"), one.writable():
                    pass
            assert contents(one.path) == {}

    run(folder_bench, scenario)
    assert folder_bench.record.versions == []


def test_a_removed_volume_takes_no_commit(folder_bench: Bench) -> None:
    async def scenario() -> None:
        async with folder_bench.worker() as one:
            folder_bench.client.delete(keys.VOLUMES)
            with pytest.raises(VolumeError, match="was removed"):
                await asyncio.to_thread(write, one, {"a": b"1"})

    run(folder_bench, scenario)
    wait_until(lambda: not folder_bench.staged(), what="an empty staging")


def test_a_refused_commit_that_goes_on_ends_the_stream(folder_bench: Bench) -> None:
    async def scenario() -> None:
        async with folder_bench.stream() as sock:
            stream = VolumeStream(sock)
            stream.send(Commit("secret", 1, 1 << 40))

            def flood() -> None:
                for _ in range(1000):
                    stream.send_data(bytes(1 << 20))

            with pytest.raises(StreamClosed):
                await asyncio.to_thread(flood)

    run(folder_bench, scenario)
    assert folder_bench.record.versions == []


def test_a_worker_sees_that_its_large_commit_is_refused_before_it_has_sent_all(folder_bench: Bench) -> None:
    async def scenario() -> None:
        async with folder_bench.worker() as one:
            with one.writable() as folder:
                with (folder / "sparse").open("wb") as sparse:
                    sparse.truncate(5 << 30)
                with pytest.raises(VolumeError, match="raise memory"):
                    await asyncio.to_thread(one.commit)
            assert await asyncio.to_thread(write, one, {"fine": b"1"}) == 1

    run(folder_bench, scenario)


def test_a_reload_that_the_store_does_not_have_changes_nothing(folder_bench: Bench, store: Store) -> None:
    async def scenario() -> None:
        async with folder_bench.worker(ONE) as one:
            assert await asyncio.to_thread(write, one, {"one": b"1"}) == 1
            record = folder_bench.record
            missing = msgspec.structs.replace(record.versions[0], number=2, tree=LayerId("0" * 64))
            record = msgspec.structs.replace(record, versions=[*record.versions, missing], last=2)
            folder_bench.client.hset(keys.VOLUMES, record.full_name, msgspec.json.encode(record))
            with pytest.raises(VolumeError, match="is not in the store"):
                await asyncio.to_thread(one.reload)
            assert (one.version, contents(one.path)) == (1, {"one": b"1"})
            with pytest.raises(VolumeConflict):
                await asyncio.to_thread(write, one, {"two": b"2"})

    run(folder_bench, scenario)


def test_a_store_that_fails_fails_the_commit(folder_bench: Bench, store: Store) -> None:
    async def scenario() -> None:
        async with folder_bench.worker() as one:
            shutil.rmtree(store.folder)
            store.folder.write_text("no folder")
            with pytest.raises(VolumeError, match="the store failed"):
                await asyncio.to_thread(write, one, {"a": b"1"})

    run(folder_bench, scenario)
    assert folder_bench.record.versions == []


def test_a_function_that_does_not_name_a_volume_is_told_how(folder_bench: Bench) -> None:
    sdk.provide_volumes([(MountedVolume(name="index", number=1), "/nowhere")], None)
    with pytest.raises(VolumeError, match=r"has no volume 'other' \(it has index\)"):
        volume("other")
    with pytest.raises(VolumeError, match='volumes=\\["index:rw"\\]'), volume("index").writable():
        pass
