"""Claim: from a call to the first token of a 15 GB model on a GPU the platform takes at most an eighth of `vllm serve`.

A Llama of 7.4 B parameters, noise in fp16, one prompt, greedy, streamed. A function with the native engine, whose
workers are forked ahead, by where its weights are: *cold*, in the store's files alone; *warm*, in the node's memory.
Its time is split by the phases of the trace. Where vLLM is installed, the same with engine="vllm" and with both
engines, and `vllm serve` from the start of its process, eager and as it comes; transformers from the start of a Python.
The files of those are in the page cache.

Run by `python -m tests.bench.gpu`, or alone:
python -m tests.bench.gpu.cold [--device cpu] [--quick] [--json FILE] [--rounds N]
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.bench.gpu.models import MODEL, QUICK_MODEL, write_model
from tests.bench.harness.by_hand import transformers_s, vllm_serve
from tests.bench.harness.caches import disk_folder, warm
from tests.bench.harness.samples import Options, Report, fine, median, parse_options, progress, spread
from tests.bench.harness.system import System, running
from tests.bench.harness.timelines import phase_rows, phases_ms
from tests.bench.harness.wire import Connection

TEXT = "Why is the sky blue? Answer in one sentence."
CALL: dict[str, Any] = {
    "messages": [{"role": "user", "content": TEXT}], "max_tokens": 4, "temperature": 0, "stream": True,
    "ignore_eos": True,
}  # fmt: skip
FUNCTION = '{name} = LLM(weights="./weights", {engine}, {size}, scale=Scale(max=1, keep_alive_s=1))'
ENGINES = {"native": 'engine="native"', "vllm": 'engine="vllm"', "two": 'engine="vllm", first="native"'}
SIZES = {
    "cuda": 'dtype="auto", gpu=1, memory="20GiB", kv_memory="2GiB"',
    "cpu": 'dtype="fp32", memory="2GiB", kv_memory="64MiB"',
}
DTYPES = {"cuda": "float16", "cpu": "float32"}
PREPARED_S = 300.0
AIM = 8.0


@dataclass(slots=True)
class Started:
    """Starts of one side in one state."""

    ttft_s: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)


def call(system: System, name: str, state: str, into: Started) -> None:
    """One call that finds no worker. RuntimeError if it found its weights elsewhere than in `state`."""
    with system.connect() as connection:
        answer = connection.post(f"/fn/{name}/v1/chat/completions", CALL).expect()
    if answer.headers["fs-start"] != state:
        raise RuntimeError(f"the call should have been {state} and was {answer.headers['fs-start']}")
    trace = system.trace(answer.headers["x-request-id"])
    into.ttft_s.append(answer.ttft_ms / 1000)
    into.phases.append(phases_ms(trace, sent_ns=answer.sent_ns, ended_ns=answer.token_ns))


@contextlib.contextmanager
def platform(folder: Path, names: list[str], device: str) -> Iterator[System]:
    """A system with a function of each of these engines, none of which has been called."""
    handler = folder / "handler.py"
    declared = [FUNCTION.format(name=name, engine=ENGINES[name], size=SIZES[device]) for name in names]
    handler.write_text("\n".join(["from fleetstart.runtime import LLM, Scale", "", *declared, ""]))
    with running("torch,torch:vllm" if len(names) > 1 else "torch") as system:
        system.fs("deploy", str(handler), "--no-probe")
        if len(names) > 1:
            ready = "a fork server with vLLM"
            system.wait(ready, lambda: system.api("/status")["nodes"][0].get("preloaded_bytes"), PREPARED_S)
        yield system


def start_ours(system: System, names: list[str], rounds: int, found: dict[str, Started]) -> None:
    def wait() -> None:
        for name in names:  # each has the whole GPU, and the next one would wait for it
            system.wait_asleep(name)

    for number in range(rounds):
        if number:
            wait()
            system.restart_node()
            system.evict_store()
        call(system, "native", "cold", found.setdefault("native, cold", Started()))
        for name in names:
            wait()
            call(system, name, "warm", found.setdefault(f"{name}, warm", Started()))
        for side, started in found.items():
            progress(f"round {number + 1} of {rounds}: {side} {started.ttft_s[-1]:.2f} s")


def serve_s(model: Path, device: str, *flags: str) -> float:
    serving = vllm_serve(model, "--dtype", DTYPES[device], *flags)
    with serving as (port, began), Connection("127.0.0.1", port) as connection:
        asked = time.monotonic()
        return asked - began + connection.post("/v1/chat/completions", CALL).expect().ttft_ms / 1000


def start_others(model: Path, options: Options, found: dict[str, Started]) -> None:
    device = options.device
    dtype = DTYPES[device]
    sides: dict[str, Callable[[], float]] = {
        "transformers, by hand": lambda: transformers_s(model, TEXT, device=device, dtype=dtype)
    }
    if find_spec("vllm"):
        sides["vllm serve, eager"] = lambda: serve_s(model, device, "--enforce-eager")
        if not options.quick:
            sides["vllm serve"] = lambda: serve_s(model, device)
    for side, measure in sides.items():
        warm([model / "model.safetensors"])
        found[side] = Started(ttft_s=[measure()])
        progress(f"{side} {found[side].ttft_s[-1]:.2f} s")


def main() -> None:
    options = parse_options(__doc__, rounds=3, quick_rounds=1)
    report = Report("from a call to the first token at most an eighth of `vllm serve`, on a GPU")
    names = list(ENGINES) if find_spec("vllm") else ["native"]
    found: dict[str, Started] = {}
    with tempfile.TemporaryDirectory(prefix="fs-bench-", dir=disk_folder()) as place:
        folder = Path(place)
        shape = write_model(folder / "weights", QUICK_MODEL if options.quick else MODEL)
        with platform(folder, names, options.device) as system:
            start_ours(system, names, options.rounds, found)
        start_others(folder / "weights", options, found)
    report.setup = {"device": options.device, "model_bytes": shape.size_bytes, "vllm": bool(find_spec("vllm"))}
    report.samples = {side: {"ttft_s": one.ttft_s, "phases_ms": one.phases} for side, one in found.items()}
    tell(report, found)
    report.save(options.json)


def tell(report: Report, found: dict[str, Started]) -> None:
    rows = [["from zero to the first token", "s, median (quartiles)"]]
    rows += [[side, spread(started.ttft_s)] for side, started in found.items()]
    report.tell("Cold starts", rows)
    ours = {side: started.phases for side, started in found.items() if started.phases}
    report.tell("Phases of a cold start", [["ms, median", *ours], *phase_rows(ours)])
    if "vllm serve, eager" in found:
        ratio = median(found["vllm serve, eager"].ttft_s) / median(found["native, cold"].ttft_s)
        print(f"\nThe claim {'holds' if ratio >= AIM else 'does not hold'}: {fine(ratio)} times sooner, cold.")


if __name__ == "__main__":
    main()
