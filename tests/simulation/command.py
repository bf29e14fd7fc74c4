"""The command line of the simulation: progress, seeds a second; of a failing seed its trace and its fewest faults."""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace

from tests.simulation.batches import BATCH, Outcome, outcomes
from tests.simulation.plan import Plan, plan_of
from tests.simulation.world import World


def main() -> int:
    options = _parser().parse_args()
    seeds: Iterable[int] = options.only or range(options.first, options.first + options.seeds)
    began_s, done, failed = time.monotonic(), 0, list[int]()
    ends_s = began_s + options.seconds if options.seconds else float("inf")
    with closing(outcomes(seeds, lambda seed: one(seed, options), ends_s)) as found:
        for outcome in found:
            done += 1
            if outcome.text:
                print(outcome.text, flush=True)
            if outcome.failed:
                failed.append(outcome.seed)
                if not options.all:
                    break
            if done % BATCH == 0:
                progress(done, began_s, failed)
    progress(done, began_s, failed)
    print(file=sys.stderr)
    return 1 if failed else 0


def one(seed: int, options: argparse.Namespace) -> Outcome:
    world = run(_kept(plan_of(seed), options.keep), traced=options.trace or options.digest)
    lines = list(world.trace or ()) if options.trace else []
    if options.digest:
        lines.append(f"{seed} {hashlib.sha256(chr(10).join(world.trace or ()).encode()).hexdigest()}")
    if world.errors:
        lines += shown(world.plan, world.errors, shrunk(world.plan, world.errors) if options.shrink else None)
    return Outcome(seed, "\n".join(lines), bool(world.errors))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--only", type=_numbers, help="these seeds, such as 3,17")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after so long, whatever is left")
    parser.add_argument("--keep", type=_numbers, help="of the faults only these, counted from 0")
    parser.add_argument("--trace", action="store_true", help="print what happens")
    parser.add_argument("--digest", action="store_true", help="print the SHA-256 of each trace")
    parser.add_argument("--shrink", action="store_true", help="look for the fewest faults with which a seed fails")
    parser.add_argument("--all", action="store_true", help="go on after a seed that fails")
    return parser


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _kept(plan: Plan, keep: Sequence[int] | None) -> Plan:
    return plan if keep is None else replace(plan, faults=tuple(plan.faults[index] for index in keep))


def run(plan: Plan, *, traced: bool = False) -> World:
    world = World(plan, traced=traced)
    world.run()
    return world


def shrunk(plan: Plan, errors: Sequence[str]) -> list[int]:
    """The faults without which it does not fail in the same way, tried one by one."""
    law = errors[0].partition(":")[0]
    kept = list(range(len(plan.faults)))
    for index in reversed(range(len(plan.faults))):
        fewer = [other for other in kept if other != index]
        if any(error.partition(":")[0] == law for error in run(_kept(plan, fewer)).errors):
            kept = fewer
    return kept


def shown(plan: Plan, errors: Sequence[str], keep: Sequence[int] | None = None) -> list[str]:
    lines = [f"\nseed {plan.seed} fails: {plan.controllers} controllers, {plan.nodes} nodes, {len(plan.faults)} faults"]
    for index, fault in enumerate(plan.faults):
        lines.append(f"  {index}{'' if keep is None or index in keep else ' (not needed)'}: {fault}")
    lines += [f"  WRONG: {error}" for error in errors[:5]]
    fewer = f" --keep {','.join(map(str, keep))}" if keep is not None else ""
    lines.append(f"  show it again: .venv/bin/python -m tests.simulation --only {plan.seed}{fewer} --trace")
    return lines


def progress(done: int, began_s: float, failed: Sequence[int]) -> None:
    took_s = time.monotonic() - began_s
    text = f"\r{done} seeds in {took_s:.0f} s, {done / max(took_s, 1e-9):.1f} a second, {len(failed)} failed"
    print(text, end="", file=sys.stderr, flush=True)
