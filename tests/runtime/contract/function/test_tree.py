"""Trees of files: parts cover the stream, what did not change keeps its parts, and what is no file is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract.errors import InvalidInput
from fleetstart.runtime.contract.function.layer import PART_BYTES, LayerFile, layer_bytes, layer_ranges, read_layer
from fleetstart.runtime.contract.function.tree import (
    LARGE_BYTES,
    in_chunks,
    list_files,
    stream_of,
    volume_manifest,
    volume_parts,
)
from fleetstart.runtime.contract.sizes import MIB

SIZES = st.one_of(st.integers(0, 3000), st.integers(0, 3 * LARGE_BYTES), st.just(PART_BYTES + 5))
FILES = st.dictionaries(st.integers(0, 10_000), SIZES, max_size=40).map(
    lambda sizes: [LayerFile(f"f{number:05}", size) for number, size in sorted(sizes.items())]
)


def begins(files: list[LayerFile]) -> dict[str, int]:
    found, at = {}, 0
    for file in files:
        found[file.path] = at
        at += file.size_bytes
    return found


@given(files=FILES)
def test_parts_cover_the_stream_and_none_is_empty_or_too_large(files: list[LayerFile]) -> None:
    parts = volume_parts(files)
    assert sum(parts) == sum(file.size_bytes for file in files)
    assert all(0 < part <= PART_BYTES for part in parts)


@given(files=FILES)
def test_a_large_file_begins_and_ends_with_a_part(files: list[LayerFile]) -> None:
    cuts, at = {0}, 0
    for part in volume_parts(files):
        at += part
        cuts.add(at)
    for file in files:
        if file.size_bytes >= LARGE_BYTES:
            assert {begins(files)[file.path], begins(files)[file.path] + file.size_bytes} <= cuts


def test_a_small_file_more_moves_few_cuts() -> None:
    files = [LayerFile(f"f{number:05}", 60_000) for number in range(1000)]
    more = sorted([*files, LayerFile("f00300-more", 10)], key=lambda file: file.path)

    def ends(of: list[LayerFile]) -> set[str]:
        """The files that end a part."""
        ending = {begin + file.size_bytes: file.path for file, begin in zip(of, begins(of).values(), strict=True)}
        found, at = set(), 0
        for part in volume_parts(of):
            at += part
            found.add(ending[at])
        return found

    assert len(ends(files)) > 15
    assert len(ends(files) ^ ends(more)) <= 4


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@given(contents=st.dictionaries(st.sampled_from(["a", "b/c", "b/d", "e.txt"]), st.binary(max_size=200)))
def test_a_manifest_is_read_as_it_was_made(
    contents: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = write(tmp_path_factory.mktemp("tree"), contents)
    files = list_files(folder, strict=True)
    manifest = volume_manifest(files, stream_of(folder, files), xxhash.xxh3_64_intdigest)
    assert read_layer(layer_bytes(manifest)) == manifest
    assert [file.path for file in files] == sorted(contents)
    assert b"".join(stream_of(folder, files)(0, 10_000)) == b"".join(contents[name] for name in sorted(contents))


def test_two_equal_files_are_one_part_and_read_twice(tmp_path: Path) -> None:
    same = os.urandom(5 * MIB)
    folder = write(tmp_path, {"a": same, "b": same, "c": b"small"})
    files = list_files(folder)
    manifest = volume_manifest(files, stream_of(folder, files), xxhash.xxh3_64_intdigest)
    assert manifest.parts[0] == manifest.parts[1]
    assert [chunk.object_offset for chunk in layer_ranges(manifest)] == [0, 4 * MIB, 0, 4 * MIB, 0]


@given(blocks=st.lists(st.binary(max_size=50)), size=st.integers(1, 30))
def test_chunks_are_the_same_bytes(blocks: list[bytes], size: int) -> None:
    chunks = list(in_chunks(blocks, size))
    assert b"".join(chunks) == b"".join(blocks)
    assert all(len(chunk) == size for chunk in chunks[:-1])


def test_a_link_to_a_file_inside_is_followed(tmp_path: Path) -> None:
    write(tmp_path, {"blobs/one": b"x"})
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model").symlink_to("../blobs/one")
    assert [file.path for file in list_files(tmp_path, strict=True)] == ["blobs/one", "snapshot/model"]


def test_what_leads_out_or_is_no_file_is_refused(tmp_path: Path) -> None:
    def refused(name: str) -> str:
        with pytest.raises(InvalidInput) as caught:
            list_files(tmp_path / name, strict=True)
        return caught.value.message

    for name in ("out", "dangling", "loop", "folder", "pipe"):
        (tmp_path / name).mkdir()
    (tmp_path / "out" / "link").symlink_to("/etc/passwd")
    (tmp_path / "dangling" / "link").symlink_to("nothing")
    (tmp_path / "loop" / "link").symlink_to("link")
    (tmp_path / "folder" / "real").mkdir()
    (tmp_path / "folder" / "link").symlink_to("real")
    os.mkfifo(tmp_path / "pipe" / "pipe")
    assert refused("out") == "link is a link out of the folder"
    assert refused("dangling") == "link is a link to nothing"
    assert refused("loop") == "link is a link to nothing"
    assert refused("folder") == "link is a link to a folder"
    assert refused("pipe") == "pipe is no file and no folder"
    assert list_files(tmp_path / "pipe") == []


def test_a_file_that_became_shorter_is_noticed(tmp_path: Path) -> None:
    folder = write(tmp_path, {"a": b"12345"})
    files = [LayerFile("a", 9)]
    with pytest.raises(InvalidInput, match="4 bytes are missing"):
        volume_manifest(files, stream_of(folder, files), xxhash.xxh3_64_intdigest)
