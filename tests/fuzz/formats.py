"""Properties of our formats' readers on any bytes: a valid result, or one of the errors that say what is wrong.

Used twice: with mutations that hypothesis makes, in every test run, and with atheris, which follows the reader's
branches, for as long as somebody has time (`fuzz_formats`).
"""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from safetensors import SafetensorError, deserialize

from fleetstart.controller.cli.weights.local_files import GeneratedFile
from fleetstart.controller.cli.weights.safetensors_header import read_file
from fleetstart.controller.cli.weights.source_layout import read_layout
from fleetstart.runtime.contract.errors import CheckpointInvalid, PickleRefused
from fleetstart.runtime.contract.weights.lora import Tensor, read_adapter
from fleetstart.runtime.contract.weights.manifest import (
    LAYER_BEFORE,
    FileEntry,
    Manifest,
    Part,
    TensorEntry,
    chunk_ranges,
    manifest_bytes,
    read_manifest,
)
from tests.controller.cli.adapters import config
from tests.controller.cli.checkpoints import encode, tensor

CHUNK_BYTES = 4096


def check_header(data: bytes) -> bool:
    """True if the header was read; then every byte that it promises is there, and the library agrees."""
    try:
        found = list(read_file(GeneratedFile("m.safetensors", data)).tensors)
    except (CheckpointInvalid, PickleRefused):
        return False
    assert all(0 <= one.offset <= one.offset + one.size_bytes <= len(data) for one in found)
    try:
        known = {name for name, _ in deserialize(data)}
    except SafetensorError as error:
        raise AssertionError(f"read by us, refused by the library: {error}") from error
    assert known == {one.name for one in found}
    return True


def check_header_text(text: bytes) -> bool:
    """Check of a header's text, to which a length and as much data as a sound one has are added."""
    return check_header(len(text).to_bytes(8, "little") + text + bytes(HEADER_DATA_BYTES))


def check_manifest(data: bytes) -> bool:
    """True if the manifest was read; then nothing in it leads out of its segment, nor out of its objects."""
    try:
        manifest = read_manifest(data)
    except CheckpointInvalid:
        return False
    assert read_manifest(manifest_bytes(manifest)) == manifest
    sizes = {part.object: part.header_bytes + part.data_bytes for part in manifest.parts}
    for one in chunk_ranges(manifest):
        assert 0 <= one.object_offset < one.object_offset + one.size_bytes <= sizes[one.object]
        assert 0 <= one.segment_offset < one.segment_offset + one.size_bytes <= manifest.total_bytes
    spans = [(entry.offset, entry.size_bytes) for entry in manifest.tensors.values()]
    spans += [(file.offset, file.size_bytes) for file in manifest.files.values()]
    assert all(0 <= offset <= offset + size_bytes <= manifest.total_bytes for offset, size_bytes in spans)
    assert all(name in manifest.tensors for name in manifest.aliases.values())
    return True


def check_layout(data: bytes) -> bool:
    try:
        layout, tensors = read_layout(data, sound_manifest())
    except CheckpointInvalid:
        return False
    assert len(layout.files) == len(tensors)
    assert not any("/" in file.name for file in layout.files)
    return True


def check_adapter(data: bytes) -> bool:
    shapes = {"lora_A": (2, 4), "lora_B": (6, 2)}
    tensors = {f"base_model.model.q.{side}.weight": Tensor("F32", shape) for side, shape in shapes.items()}
    try:
        with warnings.catch_warnings():  # of `re`, about what expressions may mean one day
            warnings.simplefilter("ignore")
            found = read_adapter(data, tensors.items(), patterns=True)
    except CheckpointInvalid:
        return False
    assert found.pairs.keys() == {"q"}
    return True


def sound_manifest() -> Manifest:
    return Manifest(
        chunk_bytes=CHUNK_BYTES,
        total_bytes=3 * CHUNK_BYTES,
        parts=[Part("part-0", 4096, CHUNK_BYTES + 100, 0), Part("part-1", 4096, 256, 2 * CHUNK_BYTES)],
        chunks=[1, 2, 3],
        tensors={
            "a": TensorEntry(64, 32, "F32", (8,), LAYER_BEFORE),
            "b": TensorEntry(CHUNK_BYTES, 100, "U8", (10, 10), 0),
            "c": TensorEntry(2 * CHUNK_BYTES, 256, "F16", (128,), 1),
        },
        files={"config.json": FileEntry(0, 50)},
        aliases={"d": "a"},
    )


def sound_header() -> bytes:
    """A whole file: the text of its header follows the first eight bytes."""
    return encode({"a": tensor(3), "b.c": tensor(2, 2, dtype="F16"), "e": tensor(0, 7, dtype="BF16")})


HEADER_DATA_BYTES = 3 * 4 + 2 * 2 * 2

TARGETS: dict[str, tuple[Callable[[bytes], bool], bytes]] = {
    "header": (check_header, sound_header()),
    "header-text": (check_header_text, sound_header()[8:-HEADER_DATA_BYTES]),
    "manifest": (check_manifest, manifest_bytes(sound_manifest())),
    "adapter": (check_adapter, json.dumps(config(target_modules=["q"])).encode()),
}
"""Each with bytes that it reads."""

WORDS: tuple[bytes, ...] = (
    b"-1", b"0", b"-0", b"1e9", b"1.5", b"NaN", b"Infinity", b"null", b"true", b"18446744073709551616", b"9" * 300,
    b"9" * 4200, b"9" * 9000, b"9223372036854775807", b"9223372036854775808", b"[]", b"{}", b'""', b'"\\ud800"',
    b'"\\u0000"', b"\x00", b"\xff", b"[" * 3000, b'{"a":' * 3000, b'"../x"', b'"shape":[1,1],', b'"a":{},',
    b'"dtype":"F32",', b'"F4"', b'"__metadata__":{"a":"b"},', b",", b" ", b"}", b"]",
)  # fmt: skip
"""What readers of JSON, of numbers and of names have stumbled over."""


def mutated(data: bytes, chance: random.Random, changes: int, words: Sequence[bytes] = WORDS) -> bytes:
    """Bytes flipped, cut out, doubled, and words put in the place of values."""
    out = bytearray(data)
    for _ in range(changes):
        at = chance.randrange(len(out) + 1)
        to = min(len(out), at + chance.randrange(12))
        match chance.randrange(5):
            case 0 if at < len(out):
                out[at] ^= 1 << chance.randrange(8)
            case 1:
                del out[at:to]
            case 2:
                out[at:at] = out[at:to]
            case 3:
                out[at:to] = chance.choice(words)
            case _:
                begin, end = _value(bytes(out), chance)
                out[begin:end] = chance.choice(words)
    return bytes(out)


def _value(data: bytes, chance: random.Random) -> tuple[int, int]:
    """Span of some number or text: behind one of , : and [, up to the next , ] or }."""
    begins = [at + 1 for at, byte in enumerate(data) if byte in b",:["]
    begin = chance.choice(begins) if begins else 0
    ends = [at for at in range(begin, min(len(data), begin + 60)) if data[at] in b",]}"]
    return begin, ends[0] if ends else begin


def replaced(value: Any, chance: random.Random, by: Any) -> Any:
    """The same JSON with one value somewhere in it replaced."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(sorted(value))
        return {**value, key: replaced(value[key], chance, by)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        at = chance.randrange(len(value))
        return [*value[:at], replaced(value[at], chance, by), *value[at + 1 :]]
    return by
