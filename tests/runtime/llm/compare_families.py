"""Claim: each family gives the tokens of transformers' `generate`, token for token in fp32, over 100 prompts.

Small random models of every family and rotary embedding (`tests.runtime.llm.families`), prompts of 1 to 100 tokens, 16
new ones each, greedy, eight at a time in our engine and one after the other in theirs. With `--folder`, the real model
there instead, in fp32, from random tokens of its vocabulary.

Run: python -m tests.runtime.llm.compare_families [--prompts 100] [--only gemma3] [--folder DIR]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fleetstart.runtime.llm.engine.generation import Request
from fleetstart.runtime.llm.engine.sampler import SamplingParams
from tests.runtime.llm.batches import some_tokens
from tests.runtime.llm.families import CASES, SHAPE, FamilyModel, family_model
from tests.runtime.llm.models import Checkpoint, config_of, engine, native, plain, run, tokens_of

NEW_TOKENS = 16


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--only", default="", help="cases with this in their names")
    parser.add_argument("--folder", type=Path, help="a real model, as save_pretrained wrote it")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.folder is not None:
        return 1 if compare(options.folder.name, real_model(options.folder), options.prompts) else 0
    different = 0
    for case in CASES:
        if options.only in case:
            different += compare(case, family_model(case), options.prompts)
    return 1 if different else 0


def real_model(folder: Path) -> FamilyModel:
    """The model in a folder of safetensors."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".json", ".jinja")}
    return FamilyModel(theirs=theirs, weights=Checkpoint(tensors, files))


def prompt_of(length: int, number: int, vocab_size: int) -> list[int]:
    if vocab_size == SHAPE["vocab_size"]:
        return some_tokens(length, number)
    noise = torch.Generator().manual_seed(number)
    return torch.randint(vocab_size, (length,), generator=noise).tolist()


def compare(case: str, model: FamilyModel, count: int) -> int:
    """Compares one family on both decoders, prints a line, and returns how many prompts had other tokens."""
    # Contexts of longrope are all short or all long in one deployment: see `runtime.llm.model.rope`.
    first, context = (33, 512) if "longrope" in case else (1, 512)
    vocab_size = config_of(model.weights).vocab_size
    prompts = [prompt_of(first + number % (101 - first), number, vocab_size) for number in range(count)]
    began = time.process_time()
    wanted = [generate(model.theirs, prompt) for prompt in prompts]
    theirs_s = time.process_time() - began
    different = 0
    for name, decoder in (("native", native), ("torch", plain)):
        began = time.process_time()
        subject: Any = engine(model.weights, decoder(model.weights, context=context))
        requests = [
            Request(tokens=prompt, max_new_tokens=NEW_TOKENS, sampling=SamplingParams(temperature=0), ignore_eos=True)
            for prompt in prompts
        ]
        found = [tokens_of(deltas) for deltas in run(subject, requests)]
        equal = sum(ours == theirs for ours, theirs in zip(found, wanted, strict=True))
        different += count - equal
        ours_s = time.process_time() - began
        print(f"{case:18} {name:6} {equal} of {count} equal; {ours_s:.1f} s, transformers {theirs_s:.1f} s", flush=True)
    return different


def generate(theirs: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    said = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    tokens: list[int] = said[0, len(prompt) :].tolist()
    return tokens


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
