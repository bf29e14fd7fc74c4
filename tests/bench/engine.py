"""Claim: one request decodes no slower than with transformers, and eight together give four times its tokens a second.

The chat example's weights (SmolLM2-135M, stored as fp16), greedy, in fp32 arithmetic on both sides: one request and
eight together, 64 new tokens each after 16 of prompt; and the first token after a prompt of 512, or of --prompt. Ours
is the engine as a worker has it (scheduler, decoder, sampler, text); theirs is `generate` of the same prompts, in fp32
and in bf16, and it is counted how often each gives our very tokens. Ours in bf16 is the same model rounded to it: where
the processor has AMX, matrices and attention are multiplied in bf16. Ours in int8, on a CPU, is what
`fs weights quantize` makes of it. All take turns, with one thread and with two. The bound is what memory allows: a step
reads every weight once, as it is stored, so one request cannot have more tokens a second than the bandwidth, measured
in turn with them, over the weights' bytes. What a grammar costs is measured with answers of a JSON schema, in turn with
free ones. With --llama-server, a built one of llama.cpp takes turns too: the same numbers in F16 and in Q8_0, its own
timings, without HTTP.

Run: python -m tests.bench.engine [--device cuda] [--json FILE] [--quick] [--peer-python PATH | --no-peer]
[--llama-server PATH] [--prompt TOKENS]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch

from fleetstart.runtime.contract.function.spec import LLMSettings
from fleetstart.runtime.llm.engine.constraint import Constraint, masked
from fleetstart.runtime.llm.engine.engine import Engine
from fleetstart.runtime.llm.engine.generation import Request
from fleetstart.runtime.llm.engine.sampler import SamplingParams
from fleetstart.runtime.llm.model.loaded_model import LoadedModel
from fleetstart.runtime.llm.model.loader import load_model
from fleetstart.runtime.llm.server.output_format import json_grammar
from tests.bench.harness.bandwidth import Reader, copy_on_gpu_bytes_per_s
from tests.bench.harness.samples import ROOT, Options, Report, fine, median, parse_options, progress, spread
from tests.bench.peers.process import HERE, Talk, peer
from tests.runtime.llm.models import Checkpoint, in_int8, real_model

MODEL = ROOT / "examples/chat/weights"
GOLDEN = ROOT / "tests/runtime/llm/golden.json"
NEW_TOKENS = 64
QUICK_TOKENS = 8
PROMPT_TOKENS = 16
LONG_TOKENS, QUICK_LONG_TOKENS = 512, 64
AIM = 4.0
SCHEMA = {"type": "array", "items": {"type": "string"}, "minItems": 100}
"""JSON of which no answer here sees the end; most tokens are allowed inside its texts, few between them."""
PEER_DTYPES = ("fp32", "bf16")
LLAMA_CPP = ("F16", "Q8_0")
"""Types of its matrices."""
OURS_IN_BF16 = "fleetstart, bf16"
OURS_IN_INT8 = "fleetstart, int8"
ALIKE = {"transformers, bf16": OURS_IN_BF16, "llama.cpp, Q8_0": OURS_IN_INT8}
"""Of a peer, which of ours has numbers of the same width."""
SETTLE_S = 0.3
"""Threads of the side whose turn it was spin for a while before they sleep."""


@dataclass(slots=True)
class Rates:
    """Tokens a second, a value a round."""

    one: list[float] = field(default_factory=list)
    eight: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)

    def columns(self) -> tuple[list[float], list[float], list[float]]:
        return self.one, self.eight, self.prefill


@dataclass(slots=True)
class Setting:
    """One number of threads."""

    threads: int
    model: LoadedModel
    rounded: dict[str, LoadedModel]
    """The same, rounded otherwise than it is stored, by what it is called in the tables."""
    long: int
    """Tokens of the long prompt."""
    ours: Rates = field(default_factory=Rates)
    of_rounded: dict[str, Rates] = field(default_factory=dict)
    """By the same names."""
    bound: Rates = field(default_factory=Rates)
    """Ours, with answers that follow a JSON schema."""
    grammar_s: list[float] = field(default_factory=list)
    """Seconds a token that the schema takes by itself: its mask, applied to logits, and its next state."""
    theirs: dict[str, Rates] = field(default_factory=dict)
    """By peer."""
    bandwidth: list[float] = field(default_factory=list)
    """Bytes a second."""
    equal: dict[str, int] = field(default_factory=dict)
    """Sequences for which that peer gave our tokens."""
    compared: int = 0


def prompts(long: int) -> tuple[list[list[int]], list[int]]:
    """Eight short prompts of real text, and a long one."""
    cases = [case["prompt_ids"] for case in json.loads(GOLDEN.read_text())["cases"]]
    short = [ids[:PROMPT_TOKENS] for ids in cases if len(ids) >= PROMPT_TOKENS]
    text = [token for ids in cases for token in ids]
    return short[:8], (text * (long // len(text) + 1))[:long]


def generate(
    model: LoadedModel, several: list[list[int]], new: int, constraint: Constraint | None = None
) -> tuple[float, float, list[list[int]]]:
    """Seconds until each has its first token, seconds for the rest, and the tokens."""
    greedy = SamplingParams(temperature=0)
    if isinstance(model.engine, Engine):
        model.engine.scheduler.pool.forget()  # each round computes its prompts
    began_s = time.perf_counter()
    ids = [
        model.engine.add(
            Request(tokens=prompt, max_new_tokens=new, sampling=greedy, ignore_eos=True, constraint=constraint)
        )
        for prompt in several
    ]
    tokens: dict[int, list[int]] = {id: [] for id in ids}
    first_s = 0.0
    while not model.engine.idle:
        for delta in model.engine.step():
            tokens[delta.id] += delta.tokens
        if not first_s and all(tokens.values()):
            first_s = time.perf_counter() - began_s
    return first_s, time.perf_counter() - began_s - first_s, list(tokens.values())


def grammar_s(constraint: Constraint, tokens: list[int]) -> float:
    """Seconds a token of what the schema adds to sampling, over an answer that follows it."""
    matcher, logits = constraint.matcher(), torch.zeros(1, constraint.vocab_size)
    began_s = time.perf_counter()
    for token in tokens:
        masked(logits, [0], [matcher])
        matcher.consume(token)
    return (time.perf_counter() - began_s) / len(tokens)


def turn(setting: Setting, read: Callable[[int], float], talks: dict[str, Talk], tokens_each: int) -> None:
    short, long = prompts(setting.long)
    setting.bandwidth.append(read(setting.threads))
    for several, new in ((short[:1], tokens_each), (short, tokens_each), ([long], 1)):
        first_s, rest_s, tokens = generate(setting.model, several, new)
        _note(setting.ours, setting.long, len(several), new, first_s, rest_s)
        setting.compared += len(several)
        for name, model in setting.rounded.items():
            first_s, rest_s, others = generate(model, several, new)
            _note(setting.of_rounded.setdefault(name, Rates()), setting.long, len(several), new, first_s, rest_s)
            _count_equal(setting, name, tokens, others)
        if new > 1:
            constraint = setting.model.constraints.compile(json_grammar(SCHEMA))
            first_s, rest_s, answers = generate(setting.model, several, new, constraint)
            _note(setting.bound, setting.long, len(several), new, first_s, rest_s)
            setting.grammar_s += [grammar_s(constraint, tokens) for tokens in answers]
        for name, talk in talks.items():
            time.sleep(SETTLE_S)
            answer = talk.ask(prompts=several, new=new, threads=setting.threads)
            theirs = setting.theirs.setdefault(name, Rates())
            _note(theirs, setting.long, len(several), new, answer["first_s"], answer["rest_s"])
            _count_equal(setting, name, tokens, answer["tokens"])
        time.sleep(SETTLE_S)


def _count_equal(setting: Setting, name: str, tokens: list[list[int]], others: list[list[int]]) -> None:
    equal = sum(a == b for a, b in zip(tokens, others, strict=True))
    setting.equal[name] = setting.equal.get(name, 0) + equal


def _note(rates: Rates, long: int, batch: int, new: int, first_s: float, rest_s: float) -> None:
    if new == 1:
        rates.prefill.append(long / first_s)
    else:
        (rates.one if batch == 1 else rates.eight).append(batch * (new - 1) / rest_s)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--llama-server", type=Path, metavar="PATH", help="llama.cpp's server takes turns too")
    parser.add_argument("--prompt", type=int, metavar="TOKENS", help=f"of the long prompt, else {LONG_TOKENS}")


def main() -> None:
    options = parse_options(__doc__, rounds=5, quick_rounds=2, more=add_options)
    report = Report("one request no slower than transformers, eight together four times its tokens a second")
    torch.set_num_threads(1)  # as in a worker: the decoder has threads of its own
    weights = real_model()
    counts = [1] if options.device == "cuda" else [1, 2]
    long = options.extra["prompt"] or (QUICK_LONG_TOKENS if options.quick else LONG_TOKENS)
    narrow, whole_numbers = _rounded(weights), in_int8(weights)
    settings = []
    for threads in counts:
        rounded = {OURS_IN_BF16: _load(narrow, options, threads, "bf16")}
        if options.device == "cpu":
            rounded[OURS_IN_INT8] = _load(whole_numbers, options, threads)
        settings.append(Setting(threads, _load(weights, options, threads), rounded, long))
    reader = Reader()
    tokens_each = QUICK_TOKENS if options.quick else NEW_TOKENS

    def read(threads: int) -> float:
        return copy_on_gpu_bytes_per_s() if options.device == "cuda" else reader.bytes_per_s(threads)

    with contextlib.ExitStack() as stack:
        talks = {name: stack.enter_context(one) for name, one in _peers(options).items()}
        for setting in () if options.quick else settings:  # the first run pays for what later ones find made
            turn(Setting(setting.threads, setting.model, setting.rounded, long), read, talks, tokens_each)
        for number in range(options.rounds):
            progress(f"round {number + 1} of {options.rounds}")
            for setting in settings:
                turn(setting, read, talks, tokens_each)
    size, int8_size = (sum(tensor.nbytes for tensor in one.values()) for one in (weights, whole_numbers))
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    about = [talk.about for talk in talks.values()]
    report.setup = {
        "device": name, "weights_bytes": size, "int8_bytes": int8_size, "new_tokens": tokens_each, "peer": about,
    }  # fmt: skip
    for setting in settings:
        report.samples[f"{setting.threads} threads"] = {
            "bandwidth_bytes_per_s": setting.bandwidth,
            "ours": asdict(setting.ours),
            **{f"ours in {name.split()[-1]}": asdict(rates) for name, rates in setting.of_rounded.items()},
            "within a JSON schema": asdict(setting.bound),
            "schema_s_a_token": setting.grammar_s,
            **{peer: asdict(rates) for peer, rates in setting.theirs.items()},
            "equal_sequences": setting.equal,
            "compared_sequences": setting.compared,
        }
        tell(report, setting, size, name)
    report.save(options.json)


def _load(weights: Checkpoint, options: Options, threads: int, dtype: Literal["fp32", "bf16"] = "fp32") -> LoadedModel:
    return load_model(weights, LLMSettings(dtype=dtype, max_batch=8), threads=threads, device=options.device)


def _rounded(weights: Checkpoint) -> Checkpoint:
    """The model as it would be stored in bf16."""
    fields = json.loads(weights.file("config.json")) | {"torch_dtype": "bfloat16", "dtype": "bfloat16"}
    files = {**weights._files, "config.json": json.dumps(fields).encode()}
    return Checkpoint({name: tensor.bfloat16() for name, tensor in weights.items()}, files)


def _peers(options: Options) -> dict[str, contextlib.AbstractContextManager[Talk]]:
    peers: dict[str, contextlib.AbstractContextManager[Talk]] = {}
    if options.peer_python is not None:
        for dtype in PEER_DTYPES:
            words = ("--model", str(MODEL), "--device", options.device, "--dtype", dtype)
            peers[f"transformers, {dtype}"] = peer(options.peer_python, HERE / "transformers_peer.py", *words)
    if (server := options.extra["llama_server"]) is not None:
        for kind in LLAMA_CPP:
            arguments = ("--server", str(server), "--matrices", kind)
            peers[f"llama.cpp, {kind}"] = peer(Path(sys.executable), HERE / "llama_cpp_peer.py", *arguments)
    return peers


def tell(report: Report, setting: Setting, size: int, device: str) -> None:
    ours, bound = setting.ours, max(setting.bandwidth) / size
    where = device if device != "cpu" else f"{setting.threads} thread{'s' * (setting.threads > 1)}"
    rows = [["tokens a second", "1 request", "8 together", f"prompt of {setting.long}"]]
    rows.append(["fleetstart", *(spread(values) for values in ours.columns())])
    for name, rates in setting.of_rounded.items():
        ratios = [median(a) / median(b) for a, b in zip(rates.columns(), ours.columns(), strict=True)]
        rows.append([name, *(spread(values) for values in rates.columns())])
        rows.append([f"{name} / fleetstart", *(f"{fine(ratio)}×" for ratio in ratios)])
    rows.append(["within a JSON schema", spread(setting.bound.one), spread(setting.bound.eight), "–"])
    costs = [median(a) / median(b) for a, b in ((setting.bound.one, ours.one), (setting.bound.eight, ours.eight))]
    rows.append(["within a JSON schema / free", *(f"{fine(cost)}×" for cost in costs), "–"])
    own = median(setting.grammar_s)
    rows.append([f"of it the schema, {own * 1e3:.2f} ms a token", f"{own * median(setting.bound.one):.1%}", "–", "–"])
    for name, rates in setting.theirs.items():
        ratios = [median(a) / median(b) for a, b in zip(ours.columns(), rates.columns(), strict=True)]
        rows.append([name, *(spread(values) for values in rates.columns())])
        rows.append([f"fleetstart / {name}", *(f"{fine(ratio)}×" for ratio in ratios)])
        if (same := ALIKE.get(name)) in setting.of_rounded:
            both = zip(setting.of_rounded[same].columns(), rates.columns(), strict=True)
            rows.append([f"{same} / {name}", *(f"{fine(median(a) / median(b))}×" for a, b in both)])
    rows.append([f"memory's bound at {max(setting.bandwidth) / 1e9:.1f} GB/s", fine(bound), fine(8 * bound), "–"])
    shares = [median(values) / limit for values, limit in ((ours.one, bound), (ours.eight, 8 * bound))]
    rows.append(["fleetstart / bound", *(f"{share:.0%}" for share in shares), "–"])
    report.tell(f"Decoding, {where}", rows)
    if (transformers := setting.theirs.get("transformers, fp32")) is not None:
        alone = median(transformers.one)
        over = [median(values) / alone for values in (ours.one, ours.eight)]
        print(f"\nThe claim {'holds' if over[0] >= 1 and over[1] >= AIM else 'does not hold'} with {where}:", end=" ")
        print(f"{over[0]:.1f}× one request of transformers with one, {over[1]:.1f}× with eight.", end=" ")
    if setting.equal:
        equal = "; ".join(f"{name}: {count}" for name, count in setting.equal.items())
        print(f"Of {setting.compared} sequences these gave our tokens for so many: {equal}.")


if __name__ == "__main__":
    main()
