"""A volume as its worker sees it after it wrote, and after a reload that failed: a version, and nothing beside it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fleetstart.runtime.contract.errors import Unavailable
from fleetstart.runtime.contract.function.volume import MountedVolume
from fleetstart.runtime.contract.ids import LayerId
from fleetstart.runtime.contract.node.volume_stream import (
    Abort,
    Commit,
    Done,
    End,
    FileHead,
    Incoming,
    Message,
    Reload,
    StreamClosed,
    VolumeStream,
    discard_files,
)
from fleetstart.runtime.sdk import volumes as sdk
from fleetstart.runtime.sdk.volumes import Volume, VolumeConflict, VolumeError, volume
from tests.prefetcher.volumes.bench import ONE, TWO, Bench, contents, run, write


@pytest.mark.parametrize("change", ["new", "written", "removed", "executable", "link"])
def test_what_was_written_after_a_commit_is_dropped_also_if_the_handler_fails(folder_bench: Bench, change: str) -> None:
    def handler(one: Volume) -> None:
        with one.writable() as folder:
            (folder / "a").write_bytes(b"1")
            assert one.commit() == 1
            if change == "new":
                (folder / "half").write_bytes(b"not commi")
            elif change == "written":
                (folder / "a").write_bytes(b"2")  # as long, and within a tick of the clock
            elif change == "removed":
                (folder / "a").unlink()
            elif change == "executable":
                (folder / "a").chmod(0o755)
            else:
                (folder / "link").symlink_to("/dev/null")
            raise LookupError("the handler failed")

    async def scenario() -> None:
        async with folder_bench.worker() as one:
            with pytest.raises(LookupError):
                await asyncio.to_thread(handler, one)
            assert (one.version, contents(one.path)) == (1, {"a": b"1"})
            assert [path.name for path in one.path.iterdir()] == ["a"]
            assert not (one.path / "a").stat().st_mode & 0o100
            assert await asyncio.to_thread(write, one, {"c": b"3"}) == 2
            assert contents(one.path) == {"a": b"1", "c": b"3"}
        async with folder_bench.worker(TWO) as two:
            assert contents(two.path) == {"a": b"1", "c": b"3"}

    run(folder_bench, scenario)


def test_it_is_the_version_that_was_committed_also_if_another_came_meanwhile(folder_bench: Bench) -> None:
    def handler(one: Volume, two: Volume) -> None:
        with one.writable() as folder:
            (folder / "a").write_bytes(b"1")
            one.commit()
            two.reload()
            write(two, {"b": b"2"})
            (folder / "half").write_bytes(b"")
            with pytest.raises(VolumeConflict):
                one.commit()

    async def scenario() -> None:
        async with folder_bench.worker(ONE) as one, folder_bench.worker(TWO) as two:
            await asyncio.to_thread(handler, one, two)
            assert (one.version, contents(one.path)) == (1, {"a": b"1"})
            assert await asyncio.to_thread(one.reload) == 2
            assert contents(one.path) == {"a": b"1", "b": b"2"}

    run(folder_bench, scenario)


Answer = list[Message | bytes]
FILE: Answer = [FileHead("a", 1), b"x", End(), Done(version=2)]
NO_ROOM: Answer = [Incoming(1, 10**15), *FILE]
NO_NAME: Answer = [Incoming(1, 1), FileHead("n" * 256, 1), b"x", End(), Done(version=2)]  # longer than a file's may be
FINE: Answer = [Incoming(1, 1), *FILE]


@contextmanager
def node(tmp_path: Path, *reloads: Answer) -> Iterator[list[Message | bytes]]:
    """A node that takes every commit, and answers one reload after the other so; yields what it was asked."""
    ours, theirs = socket.socketpair()
    asked: list[Message | bytes] = []
    answers = iter(reloads)

    def serve() -> None:
        stream = VolumeStream(theirs)
        while True:
            try:
                asked.append(message := stream.receive())
                if isinstance(message, Commit):
                    discard_files(stream)
                for frame in [Done(version=3)] if isinstance(message, Commit) else next(answers):
                    stream.send_data(frame) if isinstance(frame, bytes) else stream.send(frame)
            except StreamClosed:
                return

    thread = threading.Thread(target=serve)
    thread.start()
    mounted = [
        (MountedVolume(name=name, number=1, tree=LayerId(""), write=True), str(tmp_path / name))
        for name in ("index", "other")
    ]
    for _, folder in mounted:
        Path(folder).mkdir()
    sdk.provide_volumes(mounted, ours)
    try:
        yield asked
    finally:
        ours.close()
        thread.join()
        theirs.close()


@pytest.mark.parametrize(("failed", "told"), [(NO_ROOM, "raise memory"), (NO_NAME, "File name too long")])
def test_a_reload_that_failed_here_keeps_the_former_version_and_the_other_volumes(
    tmp_path: Path, failed: Answer, told: str
) -> None:
    with node(tmp_path, failed, FINE, [Done(version=2)]) as asked:
        with pytest.raises(VolumeError, match=told):
            volume("index").reload()
        assert (volume("index").version, contents(volume("index").path)) == (1, {})
        assert write(volume("other"), {"b": b"1"}) == 3
        # The node takes version 2 for this worker's: a commit would put the files of version 1 in its place.
        with pytest.raises(VolumeError, match=r"version 1 here.*reload\(\)"), volume("index").writable():
            pass
        assert volume("index").reload() == 2
        assert contents(volume("index").path) == {"a": b"x"}
        assert write(volume("index"), {"b": b"1"}) == 3
        reloads = [message for message in asked if isinstance(message, Reload)]
        assert reloads == [Reload("index"), Reload("index", again=True), Reload("index")]


def test_a_reload_that_the_node_gave_up_can_be_made_again(tmp_path: Path) -> None:
    refused = Done(error=Unavailable("version 2 was evicted").info())
    with node(tmp_path, [Incoming(1, 5), FileHead("a", 5), b"x", Abort(), refused], FINE):
        with pytest.raises(VolumeError, match="was evicted"):
            volume("index").reload()
        with volume("index").writable():
            pass  # the node knows that it is version 1
        assert volume("index").reload() == 2


def test_a_version_that_cannot_be_had_back_is_not_taken_for_the_one_before(tmp_path: Path) -> None:
    def handler() -> None:
        with volume("index").writable() as folder:
            (folder / "a").write_bytes(b"1")
            volume("index").commit()
            (folder / "half").write_bytes(b"")

    with node(tmp_path, NO_ROOM, FINE, [Done(version=3)]):
        with pytest.raises(VolumeError, match="raise memory"):
            handler()
        assert (volume("index").version, contents(volume("index").path)) == (1, {})
        with pytest.raises(VolumeError, match=r"reload\(\)"), volume("index").writable():
            pass
        assert volume("index").reload() == 3
        assert contents(volume("index").path) == {"a": b"x"}


def test_a_handler_has_its_own_exception_also_if_what_it_committed_cannot_be_had_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def handler() -> None:
        with volume("index").writable() as folder:
            (folder / "a").write_bytes(b"1")
            volume("index").commit()
            (folder / "half").write_bytes(b"")
            raise VolumeConflict("another version came first")

    with node(tmp_path, NO_ROOM, FINE, [Done(version=3)]):
        with pytest.raises(VolumeConflict, match="came first"):
            handler()
        assert "what was committed to volume index is not here: " in capsys.readouterr().err
        with pytest.raises(VolumeError, match=r"reload\(\)"), volume("index").writable():
            pass
        assert volume("index").reload() == 3


def test_a_block_that_ends_with_its_commit_reads_no_file_again(tmp_path: Path) -> None:
    with node(tmp_path) as asked:
        assert write(volume("index"), {"a": b"1", "b/c": b"2"}) == 3
        # Reading a file sets the time of its last access, which the commit set to zero.
        assert [(volume("index").path / name).stat().st_atime_ns for name in ("a", "b/c")] == [0, 0]
        assert contents(volume("index").path) == {"a": b"1", "b/c": b"2"}
        assert (volume("index").path / "a").stat().st_atime_ns > 0
        assert [message for message in asked if isinstance(message, Reload)] == []
