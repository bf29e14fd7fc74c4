"""The check of a folder that was committed: it reads no file without need, and sees mapped writes."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from fleetstart.runtime.contract.function.tree import list_files
from fleetstart.runtime.sdk.committed_files import Committed, digest_of, is_still, open_unseen, watch


@pytest.fixture(params=["/dev/shm", None], ids=["memory", "disk"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder with the files a, b/c and an empty folder: in memory, as workers have it, and on the disk."""
    with tempfile.TemporaryDirectory(dir=request.param or tmp_path) as name:
        folder = Path(name)
        (folder / "b").mkdir()
        (folder / "empty").mkdir()
        (folder / "a").write_bytes(b"1" * 5000)
        (folder / "b" / "c").write_bytes(b"2" * 5000)
        yield folder


def commit(folder: Path) -> Committed:
    watched = watch(folder)
    files = {}
    for file in list_files(folder, strict=True):
        with open(folder / file.path, "rb", opener=open_unseen) as opened:
            opened.read()
        files[file.path] = file.executable, digest_of(folder / file.path, opener=open_unseen)
    return Committed(files, watched)


class Reads:
    """Digests of files, with a list of those that were read."""

    def __init__(self) -> None:
        self.files: list[str] = []

    def __call__(self, path: Path) -> bytes:
        self.files.append(path.name)
        return digest_of(path)


def test_a_folder_in_which_nothing_was_done_is_told_without_reading_a_file(folder: Path) -> None:
    reads = Reads()
    assert is_still(folder, commit(folder), reads)
    assert reads.files == []


def test_of_a_folder_only_what_was_touched_is_read_again(folder: Path) -> None:
    committed, reads = commit(folder), Reads()
    (folder / "b" / "c").read_bytes()
    assert is_still(folder, committed, reads)
    (folder / "a").write_bytes(b"1" * 5000)
    assert is_still(folder, committed, reads)
    assert reads.files == ["c", "a", "c"]


def test_a_second_commit_that_is_refused_has_no_file_read(folder: Path) -> None:
    committed, reads = commit(folder), Reads()
    commit(folder)
    assert is_still(folder, committed, reads)
    assert reads.files == []


def rewrite(folder: Path) -> None:
    (folder / "a").write_bytes(b"3" * 5000)


def rewrite_with_the_same_time(folder: Path) -> None:
    state = (folder / "a").stat()
    rewrite(folder)
    os.utime(folder / "a", ns=(state.st_atime_ns, state.st_mtime_ns))


def replace(folder: Path) -> None:
    state = (folder / "a").stat()
    (folder / "new").write_bytes(b"3" * 5000)
    os.utime(folder / "new", ns=(state.st_atime_ns, state.st_mtime_ns))
    (folder / "new").replace(folder / "a")


def map_and_unmap(folder: Path) -> None:
    """A write that no time of a file in memory tells, as the page was read first; the mapping is gone at the end."""
    with (folder / "a").open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        assert mapping[0] == ord("1")
        mapping[0] = ord("3")


def add_a_folder(folder: Path) -> None:
    (folder / "new").mkdir()


def link(folder: Path) -> None:
    (folder / "a").unlink()
    (folder / "a").symlink_to("b/c")


@pytest.mark.parametrize("change", [rewrite, rewrite_with_the_same_time, replace, map_and_unmap, add_a_folder, link])
def test_a_change_right_after_the_commit_is_found(folder: Path, change: Callable[[Path], None]) -> None:
    committed = commit(folder)
    change(folder)
    assert not is_still(folder, committed)


def test_a_write_through_a_mapping_from_before_the_commit_is_found(folder: Path) -> None:
    reads = Reads()
    with (folder / "a").open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        mapping[0] = ord("1")
        committed = commit(folder)
        assert is_still(folder, committed, reads)
        mapping[0] = ord("3")
    assert not is_still(folder, committed)
    assert reads.files == ["a"]


def _map(path: Path, mapped: Event, write: Event) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        mapping[0] = ord("1")
        mapped.set()
        write.wait(60)
        mapping[0] = ord("3")


def test_a_write_through_a_mapping_of_a_child_is_found(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    mapped, write = context.Event(), context.Event()
    child = context.Process(target=_map, args=(folder / "a", mapped, write))
    child.start()
    assert mapped.wait(60)
    committed = commit(folder)
    write.set()
    child.join()
    assert not is_still(folder, committed)


def test_a_file_system_that_does_not_note_when_files_are_mapped_has_them_read(folder: Path) -> None:
    committed = commit(folder)
    reads = Reads()
    unnoted = Committed(committed.files, watch(folder, notes_mappings=lambda folder: False))
    assert is_still(folder, unnoted, reads)
    assert reads.files == ["a", "c"]
