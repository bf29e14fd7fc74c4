"""A checkpoint in the shape of a Llama, of noise that no disk or link can compress, the same on every run.

Every weight is unique: random sign, mantissa and lowest exponent bit, so that passes stay finite; a tensor's bytes
depend on its name and shape alone. The shape has 22 layers, which makes 201 tensors, at any width.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

PIECE_BYTES = 8 << 20
"""One random stream a piece, so that threads make a tensor together."""
FREE_BITS, FIXED_BITS, ONE = 0x87FF, 0x2000, 0x3C00
"""Of an fp16: what is random, what is set, and the number 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    hidden: int
    ffn: int
    vocab: int = 32000
    layers: int = 22
    heads: int
    kv_heads: int = 4

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The tensors in the order of use, as Hugging Face names them."""
        kv = self.hidden // self.heads * self.kv_heads
        square, wide = (self.hidden, self.hidden), (self.ffn, self.hidden)
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for layer in range(self.layers):
            name = f"model.layers.{layer}."
            yield name + "input_layernorm.weight", (self.hidden,)
            yield name + "self_attn.q_proj.weight", square
            yield name + "self_attn.k_proj.weight", (kv, self.hidden)
            yield name + "self_attn.v_proj.weight", (kv, self.hidden)
            yield name + "self_attn.o_proj.weight", square
            yield name + "post_attention_layernorm.weight", (self.hidden,)
            yield name + "mlp.gate_proj.weight", wide
            yield name + "mlp.up_proj.weight", wide
            yield name + "mlp.down_proj.weight", (self.hidden, self.ffn)
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocab, self.hidden)

    @property
    def size_bytes(self) -> int:
        return sum(2 * prod(shape) for _, shape in self.tensors())


SHAPES = {
    "17M": Shape(hidden=256, ffn=704, vocab=2048, heads=8),
    "64M": Shape(hidden=512, ffn=1408, vocab=2048, heads=8),
    "1.1B": Shape(hidden=2048, ffn=5632, heads=32),
    "1.7B": Shape(hidden=2560, ffn=6912, heads=20),
}
"""By parameters: 0.03, 0.1, 2.2 and 3.4 GB."""


def make(path: Path, shape: Shape) -> None:
    """Writes a safetensors file; its pages stay in the page cache, clean."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    pieces: list[tuple[int, str, int, int]] = []
    end = 0
    for name, dims in shape.tensors():
        size = 2 * prod(dims)
        table[name] = {"dtype": "F16", "shape": list(dims), "data_offsets": [end, end + size]}
        pieces += [
            (end + at, name, at // PIECE_BYTES, min(PIECE_BYTES, size - at)) for at in range(0, size, PIECE_BYTES)
        ]
        end += size
    head = json.dumps(table, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file, ThreadPoolExecutor(os.cpu_count()) as team:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + end)
        fd = file.fileno()
        list(team.map(lambda piece: os.pwrite(fd, _noise(*piece[1:]).data, 8 + len(head) + piece[0]), pieces))
        os.fsync(fd)


def _noise(name: str, index: int, size: int) -> npt.NDArray[np.uint16]:
    if "norm" in name:
        return np.full(size // 2, ONE, np.uint16)
    raw = np.random.SFC64(np.random.SeedSequence([zlib.crc32(name.encode()), index])).random_raw(-(-size // 8))
    spread = 0x0001_0001_0001_0001
    noise = (raw & np.uint64(FREE_BITS * spread)) | np.uint64(FIXED_BITS * spread)
    return noise.view(np.uint16)[: size // 2]
