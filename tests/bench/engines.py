"""Claim: a function with engine="vllm" takes at most an eighth of `vllm serve` from zero to the first token, and behind
the native engine (first="native") at most 1.2 times what that takes alone, with vLLM's throughput from then on.

SmolLM2-135M in fp32, one prompt, greedy, streamed, weights in the page cache or the node's memory. The sides take turns
within each round, all with all cores:

- serve: `vllm serve` as it comes, which compiles (with `--whole`); eager: with --enforce-eager. From the start of
  the process, its health asked for every 20 ms, to the first token of a call.
- transformers: a script that imports transformers, loads the model and gives one token, from the start of its process.
- vllm, fork: a worker forked for the call out of a parent that has imported vLLM. vllm, spare: one forked before.
- two engines, fork and spare: the same, with first="native". native: the platform's own engine alone, from a spare.

Then eight streams at a time: of vLLM alone, of two engines after the hand-over, of the native engine. Where the machine
has other work, all sides share it: read the ratios.

Run with a Python that has vLLM (`make vllm`): python -m tests.bench.engines [--json FILE] [--quick] [--rounds N]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.bench.harness.samples import ROOT, Report, fine, median, parse_options, progress, spread
from tests.bench.harness.system import System, running
from tests.bench.harness.wire import Connection
from tests.servers import free_port

MODEL = ROOT / "examples/chat/weights"
MESSAGES = [{"role": "user", "content": "Why is the sky blue? Answer in one sentence."}]
CALL: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0, "stream": True}
HANDLER = """from fleetstart.runtime import LLM, Scale

native = LLM(weights={weights!r}, engine="native", dtype="fp32", memory="4GiB", scale=Scale(keep_alive_s={keep_s}))
vllm = LLM(weights={weights!r}, engine="vllm", dtype="fp32", memory="4GiB", scale=Scale(keep_alive_s={keep_s}))
two = LLM(
    weights={weights!r}, engine="vllm", first="native", dtype="fp32", memory="4GiB", scale=Scale(keep_alive_s={keep_s})
)
"""
BY_HAND = """
import sys, time
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
inputs = tokenizer.apply_chat_template([{"role": "user", "content": sys.argv[2]}], add_generation_prompt=True,
                                       return_tensors="pt", return_dict=True)
model.generate(**inputs, max_new_tokens=1, do_sample=False)
print(time.clock_gettime(time.CLOCK_MONOTONIC))
"""
SERVE_S = 600.0
POLL_S = 0.02
PREPARED_S = 300.0
KEEP_S = 1
STREAMS, STREAM_TOKENS = 8, 64


@contextlib.contextmanager
def served(*flags: str) -> Iterator[tuple[int, float]]:
    """`vllm serve` on a free port, and when it was started; ready when it comes."""
    port = free_port()
    command = [str(Path(sys.executable).parent / "vllm"), "serve", str(MODEL), "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "8", *flags]
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile() as log:
        began = time.monotonic()
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            while not _healthy(port):
                if process.poll() is not None or time.monotonic() > began + SERVE_S:
                    log.seek(0)
                    raise RuntimeError(f"vllm serve is not ready: {log.read()[-2000:].decode(errors='replace')}")
                time.sleep(POLL_S)
            yield port, began
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _healthy(port: int) -> bool:
    try:
        with Connection("127.0.0.1", port) as connection:
            return connection.get("/health").status == 200
    except OSError:
        return False


def serve_s(rates: list[float], *flags: str) -> float:
    """From the start of `vllm serve` to its first token; then its tokens a second, into `rates`."""
    with served(*flags) as (port, began):
        with Connection("127.0.0.1", port) as connection:
            asked = time.monotonic()
            answer = connection.post("/v1/chat/completions", CALL).expect()
        rates.append(throughput(lambda: Connection("127.0.0.1", port), ""))
        return asked - began + answer.ttft_ms / 1000


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


def by_hand_s() -> float:
    """From the start of a Python to the first token of transformers in it."""
    argv = [sys.executable, "-W", "ignore", "-c", BY_HAND, str(MODEL), MESSAGES[0]["content"]]
    began = time.monotonic()
    ran = subprocess.run(argv, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=True)
    return float(ran.stdout.split()[-1]) - began


@dataclass(slots=True)
class Platform:
    """A system with the three functions, weights in memory and a fork server that has imported vLLM."""

    system: System
    paths: dict[str, str]
    seconds: list[dict[str, Any]] = field(default_factory=list)
    """What `fs explain` says of each second engine."""

    def start_s(self, name: str) -> float:
        """Time to the first token of a call that finds no worker and weights in memory."""
        self.system.wait_asleep(name)
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
def platform(keep_s: int, **settings: str) -> Iterator[Platform]:
    with tempfile.TemporaryDirectory(prefix="fs-engines-") as folder:
        handler = Path(folder) / "handler.py"
        handler.write_text(HANDLER.format(weights=str(MODEL), keep_s=keep_s))
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


def main() -> None:
    options = parse_options(__doc__, rounds=5, quick_rounds=1, more=add_options)
    report = Report('engine="vllm" takes at most an eighth of `vllm serve` from zero to the first token')
    report.setup = {"model": MODEL.name, "messages": MESSAGES, "vllm": version("vllm"), "load": [os.getloadavg()[0]]}
    firsts: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}
    with platform(KEEP_S) as spare, platform(KEEP_S, FS_POOL_SIZE="0") as forks:
        sides: dict[str, Callable[[], float]] = {
            "vllm serve, eager": lambda: serve_s(rates.setdefault("serve", []), "--enforce-eager"),
            "transformers, by hand": by_hand_s,
            "vllm, fork": lambda: forks.start_s("vllm"),
            "vllm, spare": lambda: spare.start_s("vllm"),
            "two engines, fork": lambda: forks.start_s("two"),
            "two engines, spare": lambda: spare.start_s("two"),
            "native, spare": lambda: spare.start_s("native"),
        }
        if options.extra["whole"]:
            sides = {"vllm serve": lambda: serve_s([])} | sides
        for number in range(options.rounds):
            for side, measure in sides.items():
                firsts.setdefault(side, []).append(measure())
                progress(f"round {number + 1} of {options.rounds}: {side} {firsts[side][-1]:.2f} s")
            report.setup["load"].append(os.getloadavg()[0])
        for name in options.rounds * ("vllm", "two", "native"):
            spare.start_s(name)
            rates.setdefault(name, []).append(spare.throughput(name))
            progress(f"{name}: {rates[name][-1]:.0f} tokens/s")
        seconds = spare.seconds
    report.samples = {"ttft_s": firsts, "tokens_per_s": rates, "second_engine": seconds}
    tell(report, firsts, rates, seconds)
    report.save(options.json)


def tell(
    report: Report, firsts: dict[str, list[float]], rates: dict[str, list[float]], seconds: list[dict[str, Any]]
) -> None:
    serve, native = median(firsts["vllm serve, eager"]), median(firsts["native, spare"])
    rows = [["from zero to the first token, s", "median (quartiles)", "of `vllm serve --enforce-eager`", "of native"]]
    for side, values in firsts.items():
        rows.append([side, spread(values), f"1/{fine(serve / median(values))}", f"{fine(median(values) / native)} ×"])
    report.tell("First token of SmolLM2-135M, fp32", rows)
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
