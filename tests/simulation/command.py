"""The command line of the simulation: progress, seeds a second, and of a failing seed its trace."""

from __future__ import annotations

import argparse
import gc
import hashlib
import sys
import time

from tests.simulation.plan import Plan, plan_of
from tests.simulation.world import World

COLLECT_EVERY = 20
"""Seeds between two collections of garbage: none runs within a seed, where it would end what a run holds."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after so long, whatever is left")
    parser.add_argument("--trace", action="store_true", help="print what happens")
    parser.add_argument("--digest", action="store_true", help="print the SHA-256 of each trace")
    parser.add_argument("--all", action="store_true", help="go on after a seed that fails")
    options = parser.parse_args()
    gc.disable()
    began_s, done, failed = time.monotonic(), 0, []
    for seed in range(options.first, options.first + options.seeds):
        if options.seconds and time.monotonic() - began_s > options.seconds:
            break
        world = World(plan_of(seed), traced=options.trace or options.digest)
        world.run()
        done += 1
        if options.trace:
            print("\n".join(world.trace or ()))
        if options.digest:
            print(seed, hashlib.sha256("\n".join(world.trace or ()).encode()).hexdigest())
        if world.errors:
            failed.append(seed)
            show(world.plan, world.errors)
            if not options.all:
                break
        if done % COLLECT_EVERY == 0:
            gc.collect()
            progress(done, began_s, failed)
    progress(done, began_s, failed)
    print(file=sys.stderr)
    return 1 if failed else 0


def show(plan: Plan, errors: list[str]) -> None:
    print(f"seed {plan.seed} fails: {plan.controllers} controllers, {plan.nodes} nodes, {len(plan.faults)} faults")
    for fault in plan.faults:
        print(f"  {fault}")
    for error in errors[:5]:
        print(f"  WRONG: {error}")
    print(f"  show it again: .venv/bin/python -m tests.simulation --from {plan.seed} --seeds 1 --trace", flush=True)


def progress(done: int, began_s: float, failed: list[int]) -> None:
    took_s = time.monotonic() - began_s
    text = f"\r{done} seeds in {took_s:.0f} s, {done / max(took_s, 1e-9):.1f} a second, {len(failed)} failed"
    print(text, end="", file=sys.stderr, flush=True)
