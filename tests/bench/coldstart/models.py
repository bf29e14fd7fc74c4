"""The models that start cold: the chat example, and noise in the shape of a larger Llama with its words.

Noise says nothing, but it is fetched, loaded and computed like any other weights.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.harness import llama
from tests.bench.harness.samples import ROOT

EXAMPLE = ROOT / "examples/chat"
NOISE = llama.Shape(hidden=1024, ffn=5632, vocab=49152, heads=16)
"""1.1 GB. The vocabulary is that of the example, whose tokenizer it takes; both ends of the model are 19% of it."""
QUICK_NOISE = llama.Shape(hidden=256, ffn=704, layers=12, vocab=49152, heads=4)
"""67 MB: enough for two hosts to be quicker than one."""
SCALED_NOISE = llama.Shape(hidden=256, ffn=2048, layers=13, vocab=49152, heads=4)
"""96 MB, both ends 52% of it: takes long to send and little to compute, for hosts that share two cores."""
HANDLER = """from fleetstart.runtime import LLM, Scale

noise = LLM(weights="./weights", dtype="fp32", max_batch=8, memory="2GiB", scale=Scale(max=1, keep_alive_s=60))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    name: str
    """Of the function."""
    title: str
    handler: Path
    options: tuple[str, ...] = ()
    """Of `fs deploy`."""


def chat_example() -> Model:
    size_bytes = (EXAMPLE / "weights/model.safetensors").stat().st_size
    return Model(name="chat", title=f"SmolLM2-135M, {size_bytes / 1e6:.0f} MB", handler=EXAMPLE / "handler.py")


def noise(folder: Path, shape: llama.Shape) -> Model:
    """Writes it there, as a user's folder to deploy."""
    write_noise(folder / "weights", shape)
    handler = folder / "handler.py"
    handler.write_text(HANDLER)
    return Model(name="noise", title=f"synthetic Llama, {shape.size_bytes / 1e6:,.0f} MB", handler=handler)


def write_noise(weights: Path, shape: llama.Shape) -> None:
    """Writes the weights, and the small files beside them."""
    llama.make(weights / "model.safetensors", shape)
    for path in (EXAMPLE / "weights").iterdir():
        if path.suffix in (".json", ".jinja") and path.name != "config.json":
            shutil.copy(path, weights)
    (weights / "config.json").write_text(json.dumps(config(shape)))


def config(shape: llama.Shape) -> dict[str, Any]:
    known: dict[str, Any] = json.loads((EXAMPLE / "weights/config.json").read_text())
    return known | {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden // shape.heads,
        "tie_word_embeddings": False,
    }
