"""Models for benchmarks on a GPU: noise in the shape of a Llama, with the words of the chat example."""

from __future__ import annotations

from pathlib import Path

from tests.bench.coldstart.models import QUICK_NOISE, write_noise
from tests.bench.harness import llama

MODEL = llama.Shape(hidden=4096, ffn=14336, vocab=49152, layers=32, heads=32, kv_heads=8)
"""7.4 B parameters, 14.8 GB: Llama 3.1 8B but for its vocabulary, which is that of the example."""
QUICK_MODEL = QUICK_NOISE


def write_model(folder: Path, shape: llama.Shape) -> llama.Shape:
    """Writes weights, config and tokenizer into the folder."""
    write_noise(folder, shape)
    return shape
