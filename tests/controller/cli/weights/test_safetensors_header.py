"""The closed list of ways in which a safetensors file can be wrong; the library agrees on what is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from fleetstart.controller.cli.weights.local_files import LocalFile
from fleetstart.controller.cli.weights.safetensors_header import HEADER_MAX_BYTES, read_file
from fleetstart.runtime.contract.errors import CheckpointInvalid, PickleRefused
from tests.controller.cli.checkpoints import encode, model, tensor


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "m.safetensors"


def row(begin: int, end: int, shape: list[Any] | None = None, dtype: str = "U8", **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape or [end - begin], "data_offsets": [begin, end], **more}


def test_tensors_are_where_the_header_says(file: Path) -> None:
    tensors = model()
    file.write_bytes(data := encode(tensors))
    found = list(read_file(LocalFile(file)).tensors)
    assert {one.name for one in found} == set(tensors)
    for one in found:
        assert (one.dtype, one.shape) == tensors[one.name][:2]
        assert data[one.offset : one.offset + one.size_bytes] == tensors[one.name][2]


def test_empty_tensors_and_scalars_are_allowed(file: Path) -> None:
    file.write_bytes(encode({"a": tensor(), "b": tensor(0, 7), "c": tensor(3, dtype="BF16")}))
    assert [(one.name, one.size_bytes) for one in read_file(LocalFile(file)).tensors] == [
        ("a", 4),
        ("b", 0),
        ("c", 6),
    ]


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        ({"a": row(0, 4)}, 3, "truncated: expected {total} bytes, has {has}"),
        ({"a": row(0, 4)}, 5, "1 bytes after the last tensor belong to nothing"),
        ({"a": row(0, 4), "b": row(2, 6)}, 6, "tensor 'b' overlaps 'a'"),
        ({"a": row(0, 4), "b": row(5, 6)}, 6, "tensor 'b' leaves a hole after 'a'"),
        ({"a": row(1, 4)}, 4, "tensor 'a' leaves a hole after the header"),
        ({"a": row(4, 0, [4])}, 4, "lies at 4 to 0"),
        ({"a": row(-4, 0, [4])}, 4, "lies at -4 to 0"),
        ({"a": row(0, 4, [5])}, 4, "has 4 bytes, its shape [5] in U8 needs 5"),
        ({"a": row(0, 4, [2**62, 2**62, 4])}, 4, "needs"),
        ({"a": row(0, 4, [-2, -2])}, 4, "which is not allowed"),
        ({"a": row(0, 4, [4.0])}, 4, "which is not allowed"),
        ({"a": row(0, 1, [True])}, 1, "which is not allowed"),
        ({"a": row(0, 1, [1] * 65)}, 1, "which is not allowed"),
        ({"a": row(0, 4, dtype="F24")}, 4, "dtype 'F24', which is not known"),
        ({"a": row(0, 4, [8], dtype="F4")}, 4, "dtype F4, whose elements are smaller than a byte"),
        ({"a": row(0, 6, [8], dtype="F6_E2M3")}, 6, "dtype F6_E2M3, whose elements are smaller than a byte"),
        ({"a": row(0, 4, [2**63, 2**63])}, 4, "which is not allowed"),
        ({"a": row(0, 4, [10**3000, 10**3000])}, 4, "which is not allowed"),
        ({"a": row(0, 10**3000, [4])}, 4, "lies at"),
        ({"a": row(0, 4), "__metadata__": {"a": 1}}, 4, "__metadata__ is not a table of text"),
        ({"a": row(0, 4), "__metadata__": []}, 4, "__metadata__ is not a table of text"),
        ({"a": row(0, 4, extra=1)}, 4, "and nothing else"),
        ({"a": {"dtype": "U8"}}, 0, "needs dtype, shape and data_offsets"),
        ({"a": 3}, 0, "needs dtype, shape and data_offsets"),
        ([], 0, "not a table of tensors"),
        ("x", 0, "not a table of tensors"),
    ],
)
def test_a_wrong_header_is_named(file: Path, header: Any, data: int, says: str) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    has = 8 + len(text) + data
    with pytest.raises(CheckpointInvalid) as error:
        list(read_file(LocalFile(file)).tensors)
    assert says.format(total=has + 1, has=has) in error.value.message
    assert str(file) in error.value.message


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "0 bytes are too few"),
        (b"\x08\x00\x00", "3 bytes are too few"),
        ((HEADER_MAX_BYTES + 1).to_bytes(8, "little"), "100000000 at most"),
        (b"\xff" * 64, "is it safetensors?"),
        ((100).to_bytes(8, "little") + b"{}", "truncated: expected 108 bytes for the header, has 10"),
        ((2).to_bytes(8, "little") + b"{]", "not readable"),
        ((3).to_bytes(8, "little") + b"{\xff\xfe", "not readable"),
        ((2).to_bytes(8, "little") + b"\xff\xfe", "not a table"),
        ((3).to_bytes(8, "little") + b" {}", "not a table"),
        ((4000).to_bytes(8, "little") + b"[" * 4000, "not a table"),
        ((20_000).to_bytes(8, "little") + b'{"a":' * 4000, "not readable"),
        ((20).to_bytes(8, "little") + b'{"a": NaN           ', "not readable"),
        ((8).to_bytes(8, "little") + b'{"a":-0}', "-0 is no whole number"),
    ],
)
def test_wrong_bytes_are_named(file: Path, content: bytes, says: str) -> None:
    file.write_bytes(content)
    with pytest.raises(CheckpointInvalid, match=says.replace("?", r"\?")):
        list(read_file(LocalFile(file)).tensors)


@pytest.mark.parametrize(
    "text",
    [
        '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}',
        '{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}',
        '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"\\u0061":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}}',
        '{"__metadata__":{"x":"1","x":"2"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
    ],
)
def test_a_key_that_stands_twice_is_refused(file: Path, text: str) -> None:
    """Readers differ in which one they keep, so the file would be another one to each."""
    file.write_bytes(len(text).to_bytes(8, "little") + text.encode() + b"x")
    with pytest.raises(CheckpointInvalid, match="stands twice"):
        list(read_file(LocalFile(file)).tensors)


@pytest.mark.parametrize("name", ["m.bin", "m.pt", "m.PTH", "m.ckpt", "m.pkl"])
def test_a_pickle_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(encode(model()))
    with pytest.raises(PickleRefused) as error:
        list(read_file(LocalFile(path)).tensors)
    assert name in error.value.message
    assert f"torch.load('{name}', weights_only=True)" in error.value.hint
    assert "m.safetensors" in error.value.hint


@pytest.mark.parametrize("start", [b"PK\x03\x04", b"\x80\x02}q\x00", b"\x80\x04\x95"])
def test_a_pickle_is_refused_by_its_content(file: Path, start: bytes) -> None:
    file.write_bytes(start + bytes(100))
    with pytest.raises(PickleRefused):
        list(read_file(LocalFile(file)).tensors)


def test_a_header_whose_length_looks_like_a_pickle_is_read(file: Path) -> None:
    text = json.dumps({"a": row(0, 1)}).encode().ljust(0x0280)
    assert len(text).to_bytes(8, "little").startswith(b"\x80\x02")
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"x")
    assert [one.name for one in read_file(LocalFile(file)).tensors] == ["a"]


@given(st.data())
def test_what_is_read_after_any_damage_lies_inside_the_file_and_opens_in_the_library(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(encode({"a": tensor(3), "b": tensor(2, 2, dtype="F16")}))
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content
    path = tmp_path_factory.mktemp("any") / "m.safetensors"
    path.write_bytes(content)
    try:
        found = list(read_file(LocalFile(path)).tensors)
    except (CheckpointInvalid, PickleRefused):
        return
    assert all(one.offset >= 0 and one.offset + one.size_bytes <= len(content) for one in found)
    try:
        known = dict(deserialize(bytes(content)))
    except SafetensorError:
        # Damage to the metadata: the library reads that too, we pass over it.
        return
    assert {one.name for one in found} == set(known)
