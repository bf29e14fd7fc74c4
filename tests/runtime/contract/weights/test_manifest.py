"""The manifest reader accepts what the planner may write and nothing that leads outside the segment."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract.errors import CheckpointInvalid
from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.contract.weights.manifest import (
    LAYER_BEFORE,
    FileEntry,
    Manifest,
    Part,
    TensorEntry,
    checkpoint_id,
    chunk_ranges,
    chunks_of,
    manifest_bytes,
    read_manifest,
)

CHUNK = 4096


def small() -> dict[str, Any]:
    """A sound manifest as JSON values, for tests to break: two parts, three tensors, one file."""
    manifest = Manifest(
        chunk_bytes=CHUNK,
        total_bytes=3 * CHUNK,
        parts=[
            Part("part-0.safetensors", 4096, CHUNK + 100, 0),
            Part("part-1.safetensors", 4096, 256, 2 * CHUNK),
        ],
        chunks=[1, 2, 3],
        tensors={
            "a": TensorEntry(64, 32, "F32", (8,), LAYER_BEFORE),
            "b": TensorEntry(CHUNK, 100, "U8", (10, 10), 0),
            "c": TensorEntry(2 * CHUNK, 256, "F16", (128,), 1),
        },
        files={"config.json": FileEntry(0, 50)},
    )
    value: dict[str, Any] = json.loads(manifest_bytes(manifest))
    return value


def read(value: object) -> Manifest:
    return read_manifest(json.dumps(value).encode())


def test_a_sound_manifest_is_read_and_reads_back_the_same() -> None:
    manifest = read(small())
    assert read_manifest(manifest_bytes(manifest)) == manifest
    assert manifest.weight_bytes == 32 + 100 + 256


def test_each_chunk_is_one_range_of_one_object() -> None:
    ranges = chunk_ranges(read(small()))
    assert [(r.index, r.object, r.object_offset, r.segment_offset, r.size_bytes) for r in ranges] == [
        (0, "part-0.safetensors", 4096, 0, 4096),
        (1, "part-0.safetensors", 8192, 4096, 100),
        (2, "part-1.safetensors", 4096, 8192, 256),
    ]
    assert [r.checksum for r in ranges] == [1, 2, 3]


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (["format"], "other/1", "format"),
        (["checksum"], "crc32", "not known"),
        (["chunk_bytes"], 0, "chunk size"),
        (["chunk_bytes"], 5000, "chunk size"),
        (["chunk_bytes"], 3 * 4096, "chunk size"),
        (["aliases"], {"tied": "nowhere"}, "leads nowhere"),
        (["chunk_bytes"], 1 << 40, "chunk size"),
        (["total_bytes"], -CHUNK, "segment size"),
        (["total_bytes"], CHUNK + 1, "segment size"),
        (["total_bytes"], 1 << 60, "segment size"),
        (["chunks"], [1, 2], "2 checksums for 3 chunks"),
        (["chunks"], [1, 2, -3], "64-bit"),
        (["parts", 0, "object"], "../secret", "not allowed"),
        (["parts", 0, "object"], "manifest.json", "not allowed"),
        (["parts", 1, "object"], "part-0.safetensors", "twice"),
        (["parts", 0, "data_bytes"], 0, "data 0 bytes"),
        (["parts", 0, "data_bytes"], 1 << 62, "parts end at"),
        (["parts", 0, "header_bytes"], -1, "header -1"),
        (["parts", 1, "segment_offset"], CHUNK, "begins at 4096, expected 8192"),
        (["tensors", "a", "dtype"], "F24", "not known"),
        (["tensors", "a", "shape"], [-8], "shape"),
        (["tensors", "a", "shape"], [9], "need 36 bytes"),
        (["tensors", "a", "shape"], [1] * 65 + [8], "shape"),
        (["tensors", "a", "offset"], 65, "multiple of 64"),
        (["tensors", "a", "offset"], -64, "overlaps the beginning"),
        (["tensors", "a", "offset"], 1 << 50, "outside every part"),
        (["tensors", "a", "offset"], 0, "overlaps"),
        (["tensors", "b", "offset"], CHUNK + 64, "outside every part"),
        (["files", "config.json", "size_bytes"], -1, "not allowed"),
        (["unknown"], 1, "not readable"),
        (["tensors", "a", "offset"], 1.5, "not readable"),
        (["tensors"], [], "not readable"),
    ],
)
def test_a_broken_manifest_is_refused_with_the_entry_that_is_wrong(
    path: list[str | int], value: object, says: str
) -> None:
    broken = small()
    target: Any = broken
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value
    with pytest.raises(CheckpointInvalid, match=says):
        read(broken)


def test_a_file_name_may_not_lead_elsewhere() -> None:
    broken = small()
    broken["files"]["../../etc/passwd"] = broken["files"].pop("config.json")
    with pytest.raises(CheckpointInvalid, match="not allowed"):
        read(broken)


def test_other_bytes_than_those_published_are_refused() -> None:
    data = json.dumps(small()).encode()
    assert read_manifest(data, checkpoint_id(data))
    with pytest.raises(CheckpointInvalid, match="not the bytes that were published"):
        read_manifest(data + b" ", checkpoint_id(data))
    with pytest.raises(CheckpointInvalid):
        read_manifest(data, CheckpointId("0" * 64))


@given(st.binary(max_size=300))
def test_no_bytes_whatever_raise_anything_but_checkpoint_invalid(data: bytes) -> None:
    with pytest.raises(CheckpointInvalid):
        read_manifest(data)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda x: st.lists(x, max_size=3)))
def test_no_value_in_any_field_raises_anything_but_checkpoint_invalid(value: object) -> None:
    for field in small():
        broken = small()
        broken[field] = value
        try:
            manifest = read(broken)
        except CheckpointInvalid:
            continue
        spans = [(entry.offset, entry.size_bytes) for entry in manifest.tensors.values()]
        spans += [(entry.offset, entry.size_bytes) for entry in manifest.files.values()]
        assert all(0 <= offset <= offset + size <= manifest.total_bytes for offset, size in spans)


def test_nesting_without_end_is_refused() -> None:
    with pytest.raises(CheckpointInvalid):
        read_manifest(b"[" * 200_000)


@given(
    sizes=st.lists(st.integers(1, 5 * CHUNK), min_size=1, max_size=6),
    header=st.integers(8, 9000),
)
def test_chunk_ranges_cover_every_data_byte_of_every_part_once(sizes: list[int], header: int) -> None:
    parts, offset = [], 0
    for number, size in enumerate(sizes):
        parts.append(Part(f"p{number}", header, size, offset))
        offset += -(-size // CHUNK) * CHUNK
    manifest = Manifest(
        chunk_bytes=CHUNK, total_bytes=offset, parts=parts, chunks=list(range(offset // CHUNK)), tensors={}
    )
    read_manifest(manifest_bytes(manifest))
    covered: dict[str, int] = {part.object: header for part in parts}
    for piece in chunk_ranges(manifest):
        assert piece.object_offset == covered[piece.object]
        assert piece.index == piece.segment_offset // CHUNK
        covered[piece.object] += piece.size_bytes
    assert covered == {part.object: header + part.data_bytes for part in parts}


@given(offset=st.integers(0, 20 * CHUNK), size=st.integers(0, 5 * CHUNK))
def test_chunks_of_a_range_hold_its_bytes_and_no_others(offset: int, size: int) -> None:
    manifest = msgspec.structs.replace(read(small()), total_bytes=32 * CHUNK)
    chunks = chunks_of(manifest, offset, size)
    touched = {byte // CHUNK for byte in range(offset, offset + size, 1024)} | (
        {(offset + size - 1) // CHUNK} if size else set()
    )
    assert set(chunks) == touched
