"""Every dtype of safetensors that has whole bytes, through the library that writes it and back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from fleetstart.controller.cli.weights.publish import publish
from fleetstart.controller.cli.weights.source import read_source
from fleetstart.runtime.contract.errors import CheckpointInvalid
from fleetstart.runtime.contract.weights.manifest import DTYPE_BYTES, read_manifest
from tests.controller.cli.checkpoints import MemoryStore, encode, no_progress, tensor

torch = pytest.importorskip("torch")
save_file: Any = pytest.importorskip("safetensors.torch").save_file

TORCH = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip


def test_every_dtype_that_is_known_is_tested() -> None:
    assert set(DTYPE_BYTES) == set(TORCH)


@pytest.mark.parametrize("dtype", TORCH)
def test_a_tensor_of_each_dtype_is_stored_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    kind = getattr(torch, TORCH[dtype], None)
    if kind is None:
        pytest.skip(f"this torch has no {TORCH[dtype]}")
    chance = random.Random(dtype)
    # Every bit pattern but those of a bool that is neither: NaN, subnormal and infinity are data, too.
    data = bytes(chance.randrange(2 if dtype == "BOOL" else 256) for _ in range(6 * DTYPE_BYTES[dtype]))
    written = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(kind).reshape(2, 3)
    try:
        save_file({"w": written, "scalar": written[0, 0].clone()}, tmp_path / "m.safetensors")
    except (KeyError, ValueError, TypeError) as error:
        pytest.skip(f"this safetensors does not write {dtype}: {error}")
    store = MemoryStore()
    published = publish(tmp_path / "m.safetensors", store, cache=tmp_path / "cache", progress=no_progress)
    manifest = read_manifest(store.objects[f"checkpoints/{published.id}/manifest.json"])
    (part,) = manifest.parts
    stored = store.objects[f"checkpoints/{published.id}/{part.object}"][part.header_bytes :]
    for name, shape, expected in (("w", (2, 3), data), ("scalar", (), data[: DTYPE_BYTES[dtype]])):
        entry = manifest.tensors[name]
        assert (entry.dtype, entry.shape) == (dtype, shape)
        assert stored[entry.offset : entry.offset + entry.size_bytes] == expected


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2"])
def test_what_is_smaller_than_a_byte_is_refused_with_what_to_do(dtype: str, tmp_path: Path) -> None:
    _, shape, content = tensor(8, dtype="U8")
    (tmp_path / "m.safetensors").write_bytes(encode({"w": (dtype, shape, content)}))
    with pytest.raises(CheckpointInvalid, match=f"tensor 'w' has dtype {dtype}") as error:
        read_source(tmp_path)
    assert "packed in U8" in error.value.hint
