"""Claim: the native engine decodes at 90% of vLLM's tokens a second, one request alone and 8 and 64 together.

One model on both sides, the same prompts of 32 tokens, 64 new ones each, greedy, each engine in a process of its own,
one after the other: a GPU holds one at a time. Ours is the engine as a worker has it; vLLM is its own `LLM`, with CUDA
graphs, as its users run it, and as our engine "vllm", without them. Prompts are computed before the clock starts.

Run by `python -m tests.bench.gpu`, or alone:
python -m tests.bench.gpu.decode [--device cpu] [--quick] [--json FILE] [--rounds N]
"""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path

from tests.bench.gpu.models import MODEL, QUICK_MODEL, write_model
from tests.bench.harness.caches import disk_folder
from tests.bench.harness.samples import Report, fine, median, parse_options, progress, spread
from tests.bench.weights.loaders import module

NATIVE, VLLM = "native", "vllm, by itself"
ENGINES = (NATIVE, "vllm", VLLM)
BATCHES = (1, 8, 64)
PROMPT_TOKENS, NEW_TOKENS = 32, 64
QUICK_NEW_TOKENS = 4
AIM = 0.9


def main() -> None:
    options = parse_options(__doc__, rounds=3, quick_rounds=1)
    report = Report("the native engine decodes at 90% of vLLM's tokens a second at batch 1, 8 and 64")
    engines = [name for name in ENGINES if name == NATIVE or find_spec("vllm")]
    new = QUICK_NEW_TOKENS if options.quick else NEW_TOKENS
    found: dict[str, dict[str, list[float]]] = {}
    report.setup = {"device": options.device, "prompt_tokens": PROMPT_TOKENS, "new_tokens": new, "engines": {}}
    with tempfile.TemporaryDirectory(prefix="fs-bench-", dir=disk_folder()) as folder:
        shape = write_model(Path(folder), QUICK_MODEL if options.quick else MODEL)
        report.setup["model_bytes"] = shape.size_bytes
        for name in engines:
            progress(f"{name}: loading")
            with module("tests.bench.gpu.decode_worker", folder, name, options.device) as talk:
                report.setup["engines"][name] = talk.about
                for _ in range(options.rounds):
                    for batch in BATCHES:
                        answer = talk.ask(batch=batch, prompt_tokens=PROMPT_TOKENS, new_tokens=new)
                        rate = answer["tokens"] / answer["decode_s"]
                        found.setdefault(name, {}).setdefault(str(batch), []).append(rate)
                        progress(f"{name}: {batch} together, {rate:.0f} tokens/s")
    report.samples = {"tokens_per_s": found}
    tell(report, found)
    report.save(options.json)


def tell(report: Report, found: dict[str, dict[str, list[float]]]) -> None:
    rows = [["decode, tokens/s", *(f"{batch} together" for batch in BATCHES)]]
    rows += [[f"engine {name}", *(spread(rates[str(batch)]) for batch in BATCHES)] for name, rates in found.items()]
    if VLLM in found:
        shares = [median(found[NATIVE][str(one)]) / median(found[VLLM][str(one)]) for one in BATCHES]
        rows.append(["native of vLLM by itself", *(f"{fine(share)} ×" for share in shares)])
        print(f"\nThe claim {'holds' if min(shares) >= AIM else 'does not hold'}.")
    else:
        print("\nvLLM is not installed: only the native engine was measured.")
    report.tell("Decode", rows)


if __name__ == "__main__":
    main()
