"""Layer manifests: what is written is read, and nothing that leads out of a layer's folder is."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract.errors import LayerInvalid
from fleetstart.runtime.contract.function.layer import (
    LayerFile,
    LayerManifest,
    LayerPart,
    layer_bytes,
    layer_id,
    layer_ranges,
    parts_of,
    read_layer,
    top_level,
)
from fleetstart.runtime.contract.ids import LayerId

PAGE = 4096


def manifest(files: list[LayerFile], *, chunk_bytes: int = PAGE, part_bytes: int = 4 * PAGE) -> LayerManifest:
    parts = parts_of(sum(file.size_bytes for file in files), part_bytes)
    chunks = [0] * sum(-(-part.size_bytes // chunk_bytes) for part in parts)
    return LayerManifest(
        python="cpython-311",
        platform="linux",
        lock="six==1",
        chunk_bytes=chunk_bytes,
        files=files,
        parts=parts,
        chunks=chunks,
    )


@given(sizes=st.lists(st.integers(0, 10 * PAGE), max_size=20), executable=st.booleans())
def test_a_manifest_is_read_as_it_was_written_and_its_ranges_cover_the_stream(
    sizes: list[int], executable: bool
) -> None:
    written = manifest([LayerFile(f"f{number:03}", size, executable) for number, size in enumerate(sizes)])
    data = layer_bytes(written)
    assert read_layer(data, layer_id(data)) == written
    end = 0
    for chunk in layer_ranges(written):
        assert chunk.offset == end
        assert chunk.object_offset + chunk.size_bytes <= chunk.object_bytes
        end += chunk.size_bytes
    assert end == sum(sizes)


@pytest.mark.parametrize(
    ("digests", "problem"), [(["0" * 64], "1 digests for 2 chunks"), (["0" * 64, "x" * 64], "no SHA-256")]
)
def test_digests_are_one_for_each_chunk(digests: list[str], problem: str) -> None:
    written = msgspec.structs.replace(manifest([LayerFile("a", 2 * PAGE)]), digests=digests)
    with pytest.raises(LayerInvalid, match=problem):
        read_layer(layer_bytes(written))


@pytest.mark.parametrize(
    "paths",
    [
        ["../x"],
        ["/etc/passwd"],
        ["a/../../x"],
        ["a//b"],
        ["./a"],
        [""],
        ["a\0b"],
        ["a\nb"],
        ["b", "a"],
        ["a", "a"],
        ["a", "a/b"],
        ["a", "a/b", "a-b"],
        ["x" * 2000],
    ],
)
def test_paths_that_are_not_allowed_are_refused(paths: list[str]) -> None:
    with pytest.raises(LayerInvalid, match="file"):
        read_layer(layer_bytes(manifest([LayerFile(path, 1) for path in paths])))


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "other/1"},
        {"chunk_bytes": 0},
        {"chunk_bytes": 5000},
        {"chunks": []},
        {"chunks": [1 << 64]},
        {"chunks": [-1]},
        {"parts": []},
        {"parts": [LayerPart("part-00001", 10)]},
        {"parts": [LayerPart("../part", 10)]},
        {"parts": [LayerPart("part-00000", -10)]},
        {"files": [LayerFile("a", -10)]},
        {"files": [LayerFile("a", 11)]},
    ],
)
def test_a_manifest_whose_figures_do_not_fit_is_refused(changes: dict[str, object]) -> None:
    good = manifest([LayerFile("a", 10)])
    read_layer(layer_bytes(good))
    with pytest.raises(LayerInvalid):
        read_layer(msgspec.json.encode(msgspec.structs.replace(good, **changes)))


@given(data=st.binary(max_size=200))
def test_bytes_that_are_no_manifest_are_refused(data: bytes) -> None:
    with pytest.raises(LayerInvalid):
        read_layer(data)


def test_another_manifest_than_the_one_asked_for_is_refused() -> None:
    with pytest.raises(LayerInvalid, match="digest"):
        read_layer(layer_bytes(manifest([])), LayerId("0" * 64))


def test_top_level_names_are_those_that_can_be_imported() -> None:
    entries = ["six.py", "numpy", "_fast.cpython-311-x86_64-linux-gnu.so", "six-1.16.dist-info", "__pycache__", "bin"]
    assert top_level(entries) == {"six", "numpy", "_fast", "bin"}
