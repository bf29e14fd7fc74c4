"""Claim: a function with engine="vllm" takes at most an eighth of `vllm serve` from zero to the first token, and behind
the native engine (first="native") at most 1.2 times what that takes alone, with vLLM's throughput from then on.

SmolLM2-135M in fp32, one prompt, greedy, streamed, weights in the page cache or the node's memory. The sides take turns
within each round, all with all cores:

- serve: `vllm serve` as it comes, which compiles (with `--whole`); eager: with --enforce-eager. From the start of
  the process, its health asked for every 20 ms, to the first token of a call.
- transformers: a script that imports transformers, loads the model and gives one token, from the start of its process.
- vllm, fork: a worker forked for the call out of a parent that has imported vLLM. vllm, spare: one forked before.
- two engines, fork and spare: the same, with first="native". native: the platform's own engine alone, from a spare.
- Ray Serve: a replica from zero, which loads the same weights with transformers (min_replicas=0; needs a Python with
  Ray Serve).

Then eight streams at a time: of `vllm serve`, of vLLM alone, of two engines after the hand-over, of the native engine.
Where the machine has other work, all sides share it: read the ratios. `--only starts` or `--only rates` measures one of
them; samples of what is not measured stay in FILE. `--synthetic`: a Llama of 1.1 billion random parameters, stored in
16 bits, instead.

Run with a Python that has vLLM (`make vllm`):
python -m tests.bench.engines [--json FILE] [--quick] [--rounds N] [--only KIND] [--synthetic]
[--peer-python PATH | --no-peer]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.bench.coldstart.models import write_noise
from tests.bench.harness.by_hand import transformers_s, vllm_serve
from tests.bench.harness.caches import disk_folder
from tests.bench.harness.llama import Shape
from tests.bench.harness.samples import ROOT, Options, Report, fine, median, parse_options, progress, spread
from tests.bench.harness.system import System, running
from tests.bench.harness.wire import Connection
from tests.bench.peers.process import RayServe, ray_serve

REAL = ROOT / "examples/chat/weights"
SYNTHETIC = Shape(hidden=2048, ffn=5632, layers=20, vocab=49152, heads=32)
"""2.2 GB."""
REAL_MEMORY, SYNTHETIC_MEMORY = "4GiB", "8GiB"
MESSAGES = [{"role": "user", "content": "Why is the sky blue? Answer in one sentence."}]
CALL: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0, "stream": True}
HANDLER = """from fleetstart.runtime import LLM, Scale

native = LLM(weights={weights!r}, engine="native", dtype="fp32", memory="{memory}", scale=Scale(keep_alive_s={keep_s}))
vllm = LLM(weights={weights!r}, engine="vllm", dtype="fp32", memory="{memory}", scale=Scale(keep_alive_s={keep_s}))
two = LLM(
    weights={weights!r},
    engine="vllm",
    first="native",
    dtype="fp32",
    memory="{memory}",
    scale=Scale(keep_alive_s={keep_s}),
)
"""
PREPARED_S = 300.0
KEEP_S = 1
REST_S = 1.0
"""After the last worker has gone: its memory is being freed, and a spare one forked in its place."""
STREAMS, STREAM_TOKENS = 8, 64


@dataclass(slots=True)
class Samples:
    """Seconds to the first token and tokens a second by side, and what `fs explain` says of each second engine."""

    firsts: dict[str, list[float]] = field(default_factory=dict)
    rates: dict[str, list[float]] = field(default_factory=dict)
    seconds: list[dict[str, Any]] = field(default_factory=list)


def serve_s(model: Path, *flags: str) -> float:
    """From the start of `vllm serve` to its first token."""
    with vllm_serve(model, "--dtype", "float32", *flags) as (port, began), Connection("127.0.0.1", port) as connection:
        asked = time.monotonic()
        answer = connection.post("/v1/chat/completions", CALL).expect()
        return asked - began + answer.ttft_ms / 1000


def serve_rates(model: Path, rounds: int) -> list[float]:
    with vllm_serve(model, "--dtype", "float32", "--enforce-eager") as (port, _):
        return [throughput(lambda: Connection("127.0.0.1", port), "") for _ in range(rounds)]


def ray_s(peer: RayServe) -> float:
    """From a call that finds no replica to its answer of one token."""
    peer.wait_asleep("chat")
    with peer.connect() as connection:
        return connection.post("/chat", {"messages": MESSAGES, "max_tokens": 1}).expect().total_ms / 1000


def throughput(connect: Callable[[], Connection], path: str) -> float:
    """Tokens a second of eight streams at a time, on an engine that is warm."""

    def stream(tokens: int) -> None:
        with connect() as connection:
            value = CALL | {"max_tokens": tokens, "ignore_eos": True}
            connection.post(f"{path}/v1/chat/completions", value).expect()

    with ThreadPoolExecutor(STREAMS) as threads:
        stream(8)
        began = time.monotonic()
        list(threads.map(stream, STREAMS * [STREAM_TOKENS]))
        return STREAMS * STREAM_TOKENS / (time.monotonic() - began)


@dataclass(slots=True)
class Platform:
    """A system with the three functions, weights in memory and a fork server that has imported vLLM."""

    system: System
    paths: dict[str, str]
    seconds: list[dict[str, Any]] = field(default_factory=list)
    """What `fs explain` says of each second engine."""

    def wait_asleep(self, name: str) -> None:
        self.system.wait(f"no worker of {name}", lambda: not self.system.function(name)["workers"])

    def start_s(self, name: str) -> float:
        """Time to the first token of a call that finds no worker and weights in memory."""
        self.wait_asleep(name)
        with self.system.connect() as connection:
            answer = connection.post(f"{self.paths[name]}/v1/chat/completions", CALL).expect()
        if answer.headers["fs-start"] != "warm":
            raise RuntimeError(f"the call should have been warm and was {answer.headers['fs-start']}")
        return answer.ttft_ms / 1000

    def throughput(self, name: str) -> float:
        """Tokens a second of eight streams, on a worker that is ready; of two engines, after the hand-over."""
        if name == "two":
            self.system.wait("a second engine", self._second_is_up, PREPARED_S)
        return throughput(self.system.connect, self.paths[name])

    def _second_is_up(self) -> bool:
        with self.system.connect() as connection:
            answer = connection.post(f"{self.paths['two']}/v1/chat/completions", CALL).expect()
        second = self.system.trace(answer.headers["x-request-id"]).get("second_engine") or {}
        if second.get("state") == "failed":
            raise RuntimeError(f"vLLM did not come up: {second}")
        if second.get("state") != "running":
            return False
        self.seconds.append(second)
        return True


@contextlib.contextmanager
def platform(model: Path, keep_s: int, **settings: str) -> Iterator[Platform]:
    with tempfile.TemporaryDirectory(prefix="fs-engines-") as folder:
        handler = Path(folder) / "handler.py"
        memory = REAL_MEMORY if model == REAL else SYNTHETIC_MEMORY
        handler.write_text(HANDLER.format(weights=str(model), keep_s=keep_s, memory=memory))
        with running("torch,torch:vllm", is_open=False, **settings) as system:
            names = ("native", "vllm", "two")
            system.fs("deploy", str(handler), "--no-probe")
            made = Platform(system, {name: f"/fn/{name}" for name in names})
            ready = "a fork server with vLLM"
            system.wait(ready, lambda: system.api("/status")["nodes"][0].get("preloaded_bytes"), PREPARED_S)
            for name in names:  # the weights are in memory from the first call on
                with system.connect() as connection:
                    connection.post(f"{made.paths[name]}/v1/chat/completions", CALL).expect()
            yield made


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--whole", action="store_true", help="also `vllm serve` as it comes, which compiles")
    parser.add_argument("--side", action="append", help="of the starts, this one alone; may be given several times")
    parser.add_argument("--only", choices=("starts", "rates"), help="measure one kind")
    parser.add_argument("--synthetic", action="store_true", help="a model of 1.1 billion random parameters")


def measure_starts(options: Options, model: Path, found: Samples, spare: Platform, load: list[float]) -> None:
    with contextlib.ExitStack() as stack:
        forks = stack.enter_context(platform(model, KEEP_S, FS_POOL_SIZE="0"))
        sides: dict[str, Callable[[], float]] = {
            "vllm serve, eager": lambda: serve_s(model, "--enforce-eager"),
            "transformers, by hand": lambda: transformers_s(model, MESSAGES[0]["content"]),
            "vllm, fork": lambda: forks.start_s("vllm"),
            "vllm, spare": lambda: spare.start_s("vllm"),
            "two engines, fork": lambda: forks.start_s("two"),
            "two engines, spare": lambda: spare.start_s("two"),
            "native, spare": lambda: spare.start_s("native"),
        }
        if options.extra["whole"]:
            sides = {"vllm serve": lambda: serve_s(model)} | sides
        if options.peer_python:
            peer = stack.enter_context(ray_serve(options.peer_python, model=model))
            sides["Ray Serve + transformers"] = lambda: ray_s(peer)
        sides = {side: sides[side] for side in options.extra["side"] or sides}
        for number in range(options.rounds):
            for side, measure in sides.items():
                rest(spare, forks)
                found.firsts.setdefault(side, []).append(measure())
                progress(f"round {number + 1} of {options.rounds}: {side} {found.firsts[side][-1]:.2f} s")
            load.append(os.getloadavg()[0])


def rest(*platforms: Platform) -> None:
    """Waits until no worker is left: a second engine that is still being built would take the next side's cores."""
    for one in platforms:
        for name in one.paths:
            one.wait_asleep(name)
    time.sleep(REST_S)


def measure_rates(options: Options, model: Path, found: Samples, spare: Platform) -> None:
    found.rates["serve"] = serve_rates(model, options.rounds)
    for name in options.rounds * ("vllm", "two", "native"):
        rest(spare)
        spare.start_s(name)
        found.rates.setdefault(name, []).append(spare.throughput(name))
        progress(f"{name}: {found.rates[name][-1]:.0f} tokens/s")
    found.seconds = spare.seconds


def main() -> None:
    options = parse_options(__doc__, rounds=5, quick_rounds=1, more=add_options)
    report = Report('engine="vllm" takes at most an eighth of `vllm serve` from zero to the first token')
    only = options.extra["only"]
    found, load = Samples(), [os.getloadavg()[0]]
    with contextlib.ExitStack() as stack:
        model = REAL
        if options.extra["synthetic"]:
            model = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fs-bench-", dir=disk_folder())))
            write_noise(model, SYNTHETIC)
        spare = stack.enter_context(platform(model, KEEP_S))
        if only != "rates":
            measure_starts(options, model, found, spare, load)
        if only != "starts":
            measure_rates(options, model, found, spare)
    load.append(os.getloadavg()[0])
    if only and options.json and options.json.exists():
        before = json.loads(options.json.read_text())["samples"]
        found.firsts = before["ttft_s"] | found.firsts
        found.rates, found.seconds = found.rates or before["tokens_per_s"], found.seconds or before["second_engine"]
    name = "synthetic Llama" if options.extra["synthetic"] else "SmolLM2-135M"
    report.setup = {"model": name, "messages": MESSAGES, "vllm": version("vllm"), "load": load, "only": only}
    report.samples = {"ttft_s": found.firsts, "tokens_per_s": found.rates, "second_engine": found.seconds}
    if found.firsts:
        tell_starts(report, name, found.firsts)
    if found.rates:
        tell_rates(report, found.rates, found.seconds)
    report.save(options.json)


def tell_starts(report: Report, name: str, firsts: dict[str, list[float]]) -> None:
    serve, native = (
        median(firsts[side]) if side in firsts else None for side in ("vllm serve, eager", "native, spare")
    )
    rows = [["from zero to the first token, s", "median (quartiles)", "of `vllm serve --enforce-eager`", "of native"]]
    for side, values in firsts.items():
        of_serve = f"1/{fine(serve / median(values))}" if serve else "–"
        of_native = f"{fine(median(values) / native)} ×" if native else "–"
        rows.append([side, spread(values), of_serve, of_native])
    report.tell(f"First token of {name}, fp32", rows)


def tell_rates(report: Report, rates: dict[str, list[float]], seconds: list[dict[str, Any]]) -> None:
    alone = median(rates["vllm"])
    rows = [["eight streams at a time, tokens/s", "median (quartiles)", "of vLLM alone"]]
    names = {
        "serve": "`vllm serve`, eager",
        "vllm": "vLLM alone",
        "two": "two engines, after the hand-over",
        "native": "native alone",
    }
    rows += [[names[name], spread(values), f"{fine(median(values) / alone)} ×"] for name, values in rates.items()]
    report.tell("Tokens a second", rows)
    took = [second["took_ms"] / 1000 for second in seconds]
    report.tell("vLLM behind the native engine", [["its start, s", "median (quartiles)"], ["took", spread(took)]])


if __name__ == "__main__":
    main()
