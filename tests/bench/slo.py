"""Claim: more calls of a real trace get their first token in time than with single-worker starts, cached or not.

A test bed of four hosts; a score of functions, each with a model of its own (noise in the shape of a Llama, 77 MB),
that sleep soon; and the calls of an Azure Functions trace in their order, several times as fast as they were. Times
between calls are drawn from a Gamma distribution with the trace's own coefficient of variation, as HydraServe draws
them (section 8.3): the trace's timers call up to fifteen functions in the same instant, whose models no way of starting
could bring over four links in time. Every function promises a first token in 0.7 of the time that one host takes to
fetch its model: so a cold start by a single worker is late, and all else need not be. Sides, one after the other:

- ours: the planner as it is.
- single: the same, but every start is one worker. Weights stay in a node's memory while there is room, as with ours.
- single, all cached: each node also keeps whatever it has fetched on its disk, so nothing comes twice over its link.

Before the first side a few calls tell the planner what links and starts are like, as a cluster in service knows.
A call that fails is late. The trace is not ours to copy: without `--trace` or that folder there is nothing to run.

All of it at several rates: with more calls a second there is less to share, until every link is always busy. Four
hosts on one machine also share its cores, which a pipeline's starts want more of than single ones.

Run: python -m tests.bench.slo [--trace FILE] [--begin S] [--rates R ...] [--calls N] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx

from tests.bench.coldstart.fleet import Fleet
from tests.bench.coldstart.models import Model, config
from tests.bench.harness import llama
from tests.bench.harness.caches import disk_folder
from tests.bench.harness.samples import Options, Report, fine, median, parse_options, percentile, progress
from tests.bench.weights import ours
from tests.runtime.llm.models import byte_tokenizer
from tests.testbed import Testbed, why_not

TRACE = Path(__file__).resolve().parents[3] / "shared/data/traces/azure_functions_2021_199.csv"
HOSTS = 4
PROMPT, TOKENS = "Why?", 4
"""Short: what is computed for one function waits for what is computed for others, on the cores that all hosts share."""
CV = 1.86
"""Of the times between the trace's calls."""
PROMISE_SHARE = 0.7
"""Of the time that one host takes to fetch a model."""
RATES = [0.25, 0.5, 1.0]
LINK_SHARE = 0.95
"""Of a link's rate, what TCP gets."""
SHAPE = llama.Shape(hidden=512, ffn=1408, vocab=258, layers=13, heads=8)
"""A quarter of it is just enough for a measurement of a link."""
NODE = {"FS_PROFILES": "torch", "FS_POOL_MEMORY": "256MiB", "FS_NODE_MEMORY": "1536MiB"}
"""Room for four workers with their models, so that others' must go."""
LEARNT_FROM = 4
"""Functions that are called before the first side, each twice: cold, and hot."""
SIDES = {"ours": ("", "0"), "single": ("single", "0"), "single, all cached": ("single", "20GiB")}
HANDLER = """from fleetstart.runtime import LLM, SLO, Scale

model = LLM(
    name="{name}", weights="./weights", dtype="fp32", max_batch=8, max_context=512, kv_memory="64MiB", threads=1,
    memory="256MiB", scale=Scale(max=1, keep_alive_s=3), slo=SLO(ttft_s={ttft_s}),
)
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, default=TRACE, metavar="FILE", help="CSV with arrival_s,function")
    parser.add_argument("--calls", type=int, help="default 40, 8 with --quick")
    parser.add_argument(
        "--begin", type=float, default=60.0, metavar="S", help="of the trace; default 60, after all began at once"
    )
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, metavar="R", help="calls a second")
    parser.add_argument("--seed", type=int, default=1, help="of the times between calls; default 1")
    parser.add_argument("--mbit", type=float, default=150.0, help="of each host's link; default 150")


def main() -> None:
    options = parse_options(__doc__, rounds=1, quick_rounds=1, more=add_options)
    extra = options.extra
    if not extra["trace"].exists():
        sys.exit(f"no trace: {extra['trace']} does not exist; give one with --trace")
    if reason := why_not():
        sys.exit(f"no test bed here: {reason}")
    calls = extra["calls"] or (8 if options.quick else 40)
    replayed = {
        rate: slice_of(extra["trace"], extra["begin"], calls, rate, extra["seed"])
        for rate in (extra["rates"][-1:] if options.quick else extra["rates"])
    }
    count = len({function for arrivals in replayed.values() for _, function in arrivals})
    promise_s = round(PROMISE_SHARE * SHAPE.size_bytes / (LINK_SHARE * extra["mbit"] * 1e6 / 8), 2)
    report = Report("more calls of a trace get their first token in time than with single-worker starts")
    report.setup = {
        "hosts": HOSTS,
        "mbit": extra["mbit"],
        "functions": count,
        "promise_s": promise_s,
        "model_bytes": SHAPE.size_bytes,
        "trace": {"name": extra["trace"].name, "cv": CV, **{name: extra[name] for name in ("begin", "seed")}},
        "node": NODE,
    }
    found: dict[str, dict[str, list[Any]]] = {str(rate): {side: [] for side in SIDES} for rate in replayed}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fs-bench-", dir=disk_folder())))
        fleet = Fleet(stack.enter_context(Testbed(nodes=HOSTS, mbit=extra["mbit"], env=NODE)))
        with ThreadPoolExecutor(os.cpu_count()) as team:
            models = list(team.map(lambda number: _deployed(fleet, folder, number, promise_s), range(count)))
        _learn(fleet, models)
        for number in range(options.rounds):
            for rate, arrivals in replayed.items():
                for side in SIDES:
                    progress(f"round {number + 1} of {options.rounds}: {rate:g} a second, {side}, {calls} calls")
                    found[str(rate)][side] += _run(fleet, models, arrivals, *SIDES[side])
    report.samples = {
        rate: {side: [(ttft_s, start) for _, ttft_s, start, *_ in calls] for side, calls in sides.items()}
        for rate, sides in found.items()
    }
    _tell(report, options, found, promise_s)
    report.save(options.json)


def slice_of(trace: Path, begin_s: float, calls: int, rate: float, seed: int) -> list[tuple[float, int]]:
    """(second, function) of so many calls from `begin_s` of the trace on; functions are numbered as they appear."""
    with trace.open(newline="") as file:
        names = [row["function"] for row in csv.DictReader(file) if float(row["arrival_s"]) >= begin_s][:calls]
    places = {name: place for place, name in enumerate(dict.fromkeys(names))}
    drawn, shape = random.Random(seed), 1 / CV**2
    gaps_s = [drawn.gammavariate(shape, 1 / (rate * shape)) for _ in names]
    return list(zip(accumulate(gaps_s), [places[name] for name in names], strict=True))


def _deployed(fleet: Fleet, folder: Path, number: int, promise_s: float) -> Model:
    """A deployed model, whose objects are put into the store's folder at once; the deployment finds them there."""
    name = f"f{number:02}"
    shape = replace(SHAPE, ffn=SHAPE.ffn + 16 * number)  # so that no two have the same bytes
    weights = folder / name / "weights"
    llama.make(weights / "model.safetensors", shape)
    files = {
        "config.json": json.dumps(config(shape) | {"eos_token_id": 1}).encode(),
        "tokenizer.json": byte_tokenizer(),
        "generation_config.json": b'{"eos_token_id": 1, "do_sample": false}',
        "chat_template.jinja": b"{{ messages[0]['content'] }}",
        "tokenizer_config.json": b"{}",
    }
    for path, content in files.items():
        (weights / path).write_bytes(content)
    ours.publish(weights, fleet.bed.bucket, folder / "ids")
    handler = folder / name / "handler.py"
    handler.write_text(HANDLER.format(name=name, ttft_s=promise_s))
    model = Model(name=name, title=name, handler=handler)
    progress(f"deploying {name}")
    fleet.deploy(model)
    return model


def _learn(fleet: Fleet, models: list[Model]) -> None:
    progress("learning")
    fleet.chill(HOSTS)
    for model in models[:LEARNT_FROM]:
        fleet.ask(model, tokens=TOKENS, prompt=PROMPT)
        fleet.ask(model, tokens=TOKENS, prompt=PROMPT)
    time.sleep(2.0)  # the last of it is learned


def _run(fleet: Fleet, models: list[Model], arrivals: list[tuple[float, int]], change: str, disk: str) -> list[Any]:
    """Every call at its time, from hosts that have nothing: [function, seconds or None, kind of start, when, id]."""
    for node in fleet.bed.nodes:
        node.env["FS_DISK_CACHE"] = disk
    fleet.chill(HOSTS, change=change)
    found: list[Any] = [None] * len(arrivals)
    began_s = time.monotonic()

    def call(place: int, at_s: float, function: int) -> None:
        time.sleep(max(0.0, began_s + at_s - time.monotonic()))
        try:
            generated = fleet.ask(models[function], tokens=TOKENS, prompt=PROMPT)
            found[place] = [function, generated.ttft_s, generated.start, at_s, generated.request_id]
        except (RuntimeError, httpx.HTTPError) as error:
            found[place] = [function, None, str(error)[:200], at_s, ""]

    threads = [threading.Thread(target=call, args=(place, *one)) for place, one in enumerate(arrivals)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _tell(report: Report, options: Options, found: dict[str, dict[str, list[Any]]], promise_s: float) -> None:
    rows = [["calls a second", "side", "in time", "median, s", "slowest tenth, s", "cold", "warm", "hot", "failed"]]
    holds = 0
    for rate, sides in found.items():
        shares: dict[str, float] = {}
        for side, calls in sides.items():
            seconds = [ttft_s for _, ttft_s, *_ in calls if ttft_s is not None]
            starts = Counter(start for _, ttft_s, start, *_ in calls if ttft_s is not None)
            shares[side] = sum(ttft_s <= promise_s for ttft_s in seconds) / len(calls)
            figures = [fine(median(seconds)), fine(percentile(seconds, 0.9))] if seconds else ["–", "–"]
            kinds = [str(starts[kind]) for kind in ("cold", "warm", "hot")]
            rows.append([rate, side, f"{shares[side]:.0%}", *figures, *kinds, str(len(calls) - len(seconds))])
        holds += shares["ours"] >= max(shares.values())
    count = len(next(iter(found.values()))["ours"])
    report.tell(f"First tokens within {promise_s:g} s, of {count} calls on {os.cpu_count()} cores", rows)
    print(f"\nThe claim holds at {holds} of {len(found)} rates.")


if __name__ == "__main__":
    main()
