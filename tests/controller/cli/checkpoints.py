"""Weights for tests, written by hand, and a store in memory: an ObjectStore like any other, only smaller."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from fleetstart.runtime.contract.weights.manifest import DTYPE_BYTES

Tensor = tuple[str, tuple[int, ...], bytes]


def encode(tensors: Mapping[str, Tensor], *, header: Mapping[str, object] | None = None) -> bytes:
    """A safetensors file; `header` replaces the table that would fit."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, content) in tensors.items():
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + len(content)]}
        end += len(content)
    text = json.dumps(header if header is not None else table).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(content for _, _, content in tensors.values())


def tensor(*shape: int, dtype: str = "F32", seed: int = 0) -> Tensor:
    size = DTYPE_BYTES[dtype]
    for dim in shape:
        size *= dim
    return dtype, shape, bytes((seed * 131 + at * 7) % 251 for at in range(size))


def model(layers: int = 3, width: int = 5) -> dict[str, Tensor]:
    names = ["lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"]
    names += [f"model.layers.{layer}.{part}.weight" for layer in reversed(range(layers)) for part in ("mlp", "attn")]
    return {name: tensor(width, width + number, seed=number) for number, name in enumerate(names)}


class MemoryStore:
    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.puts: list[str] = []
        self.announced: list[bytes] = []

    def object_size(self, key: str) -> int | None:
        return len(self.objects[key]) if key in self.objects else None

    def put_object(self, key: str, content: Iterator[bytes] | bytes, size_bytes: int) -> None:
        data = content if isinstance(content, bytes) else b"".join(content)
        assert len(data) == size_bytes
        self.objects[key] = data
        self.puts.append(key)

    def begin_upload(self, manifest: bytes) -> None:
        self.announced.append(manifest)


def no_progress(what: str, done: int, total: int) -> None:
    assert 0 <= done <= total, what


def write_model(
    folder: Path, tensors: Mapping[str, Tensor], *, shards: int = 1, files: Mapping[str, str] | None = None
) -> Path:
    """A folder as Hugging Face has it, in one file or with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (files or {"config.json": '{"model_type": "test"}'}).items():
        (folder / name).write_text(text)
    if shards == 1:
        (folder / "model.safetensors").write_bytes(encode(tensors))
        return folder
    names = list(tensors)
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        mine = {name: tensors[name] for name in names[number::shards]}
        (folder / file).write_bytes(encode(mine))
        weight_map.update(dict.fromkeys(mine, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
