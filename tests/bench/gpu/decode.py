"""Claim: the native engine decodes at 90% of vLLM's tokens a second, one request alone and 8 and 64 together.

One model on both sides, the same prompts of 32 and of 1,024 tokens, 64 new ones each, greedy, each engine in a process
of its own, one after the other: a GPU holds one at a time. Ours is the engine as a worker has it; vLLM is its own
`LLM`, with CUDA graphs, as its users run it, and as our engine "vllm", with graphs of decode steps and no compiler.
Counted is what a batch takes beyond one that ends with its first tokens; what that one takes, by prompts' tokens, is a
table of its own, without an aim.

Run by `python -m tests.bench.gpu`, or alone:
python -m tests.bench.gpu.decode [--device cpu] [--quick] [--json FILE] [--rounds N]
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from tests.bench.gpu.models import MODEL, QUICK_MODEL, write_model
from tests.bench.harness.caches import disk_folder
from tests.bench.harness.samples import Report, fine, median, parse_options, progress, spread
from tests.bench.weights.loaders import module

NATIVE, VLLM = "native", "vllm, by itself"
ENGINES = (NATIVE, "vllm", VLLM)
BATCHES = (1, 8, 64)
PROMPTS, NEW_TOKENS = (32, 1024), 64
QUICK_NEW_TOKENS = 4
AIM = 0.9


def main() -> None:
    options = parse_options(__doc__, rounds=3, quick_rounds=1)
    report = Report("the native engine decodes at 90% of vLLM's tokens a second at batch 1, 8 and 64")
    engines = [name for name in ENGINES if name == NATIVE or find_spec("vllm")]
    lengths, new = (PROMPTS[:1], QUICK_NEW_TOKENS) if options.quick else (PROMPTS, NEW_TOKENS)
    found: dict[str, dict[str, list[float]]] = {}
    read: dict[str, dict[str, list[float]]] = {}
    report.setup = {"device": options.device, "prompt_tokens": lengths, "new_tokens": new, "engines": {}}
    with tempfile.TemporaryDirectory(prefix="fs-bench-", dir=disk_folder()) as folder:
        shape = write_model(Path(folder), QUICK_MODEL if options.quick else MODEL)
        report.setup["model_bytes"] = shape.size_bytes
        for name in engines:
            progress(f"{name}: loading")
            with module("tests.bench.gpu.decode_worker", folder, name, options.device) as talk:
                report.setup["engines"][name] = talk.about
                for prompt, _, batch in itertools.product(lengths, range(options.rounds), BATCHES):
                    answer = talk.ask(batch=batch, prompt_tokens=prompt, new_tokens=new)
                    rate = answer["tokens"] / answer["decode_s"]
                    found.setdefault(name, {}).setdefault(f"{prompt}/{batch}", []).append(rate)
                    read.setdefault(name, {}).setdefault(f"{prompt}/{batch}", []).append(
                        prompt * batch / answer["first_s"]
                    )
                    progress(f"{name}: {batch} together after {prompt} tokens, {rate:.0f} tokens/s")
    report.samples = {"tokens_per_s": found, "prompt_tokens_per_s": read}
    tell(report, found, lengths)
    report.tell("Prompts", table("prompts, tokens/s", read, lengths)[0])
    report.save(options.json)


def tell(report: Report, found: dict[str, dict[str, list[float]]], lengths: Sequence[int]) -> None:
    rows, shares = table("decode, tokens/s", found, lengths)
    if shares:
        print(f"\nThe claim {'holds' if min(shares) >= AIM else 'does not hold'}.")
    else:
        print("\nvLLM is not installed: only the native engine was measured.")
    report.tell("Decode", rows)


def table(
    title: str, found: dict[str, dict[str, list[float]]], lengths: Sequence[int]
) -> tuple[list[list[str]], list[float]]:
    """Rates of each engine by prompts and batch, and ours of vLLM's, in the table and by themselves."""
    rows = [[title, *(f"{batch} together" for batch in BATCHES)]]
    shares: list[float] = []
    for prompt in lengths:
        keys = [f"{prompt}/{batch}" for batch in BATCHES]
        rows += [[f"{name}, prompts of {prompt}", *(spread(one[key]) for key in keys)] for name, one in found.items()]
        if VLLM in found:
            ratios = [median(found[NATIVE][key]) / median(found[VLLM][key]) for key in keys]
            rows.append([f"native of vLLM, prompts of {prompt}", *(f"{fine(ratio)} ×" for ratio in ratios)])
            shares += ratios
    return rows, shares


if __name__ == "__main__":
    main()
