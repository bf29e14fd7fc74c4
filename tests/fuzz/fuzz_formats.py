"""Fuzzer of our readers of formats and protocols: looks for bytes on which one fails with another error than its own.

    python -m tests.fuzz.fuzz_formats SECONDS [TARGET ...]
    python -m tests.fuzz.fuzz_formats --runs COUNT [--seed SEED] [TARGET ...]

The first, with atheris (`pip install atheris`), by coverage: each target in a process of its own, which ends at the
first finding and prints it; without atheris by random mutations of sound input for so many seconds each. The second
(`make fuzz`) by so many random mutations in all. Both print executions a target.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import math
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz import formats, protocols
from tests.fuzz.formats import mutated

TARGETS = {**formats.TARGETS, **protocols.TARGETS}
WORDS = (*formats.WORDS, *protocols.WORDS)
CHANGES_MAX = 6


def fuzz_at_random(name: str, *, seconds: float = math.inf, count: float = math.inf, seed: int = 0) -> int:
    check, sound = TARGETS[name]
    chance = random.Random(f"{seed} {name}")
    ends = time.monotonic() + seconds
    runs = read = 0
    while runs < count and time.monotonic() < ends:
        data = mutated(sound, chance, 1 + chance.randrange(CHANGES_MAX), WORDS)
        try:
            read += check(data)
        except Exception:
            print(f"{name}: FOUND {data!r}", flush=True)
            raise
        runs += 1
    print(f"{name}: {runs:,} executions at random, {read:,} of them read, nothing found", flush=True)
    return 0


def fuzz_by_coverage(name: str, seconds: float) -> int:
    """Fuzzes in a child process: atheris ends its process, and wants to see the imports."""
    with tempfile.TemporaryDirectory() as corpus:
        (Path(corpus) / "sound").write_bytes(TARGETS[name][1])
        dictionary = Path(corpus).with_suffix(".dict")
        dictionary.write_text("".join(f'"{_escaped(word[:64])}"\n' for word in WORDS))
        command = [sys.executable, "-m", "tests.fuzz.fuzz_formats", "--child", name, corpus]
        options = [f"-max_total_time={round(seconds)}", f"-dict={dictionary}", "-max_len=20000", "-print_final_stats=1"]
        options.append(f"-artifact_prefix={corpus}/")
        result = subprocess.run([*command, *options], stderr=subprocess.PIPE, text=True)
        dictionary.unlink()
    told = [line for line in result.stderr.splitlines() if "number_of_executed_units" in line]
    if result.returncode == 0:
        print(f"{name}: {int(told[0].split()[-1]):,} executions by coverage, nothing found", flush=True)
    else:
        print(f"{name}: FOUND\n{result.stderr[-6000:]}", flush=True)
    return result.returncode


def _escaped(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)


def _child(name: str, arguments: list[str]) -> None:
    import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

    from fleetstart.controller.cli.weights import safetensors_header
    from fleetstart.runtime.contract.weights import lora, manifest

    for module in (lora, safetensors_header, manifest):
        for attribute, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == module.__name__:
                setattr(module, attribute, atheris.instrument_func(value))
    check = TARGETS[name][0]
    atheris.Setup([sys.argv[0], *arguments], lambda data: check(bytes(data)) and None)
    atheris.Fuzz()


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        _child(sys.argv[2], sys.argv[3:])
        return 0
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.fuzz_formats")
    parser.add_argument("--runs", type=int, help="random mutations in all, instead of seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("arguments", nargs="*", metavar="[SECONDS] TARGET")
    options = parser.parse_args()
    if options.runs is not None:
        names = options.arguments or list(TARGETS)
        each = -(-options.runs // len(names))
        return max(fuzz_at_random(name, count=each, seed=options.seed) for name in names)
    seconds, names = float(options.arguments[0]), options.arguments[1:] or list(TARGETS)
    covered = importlib.util.find_spec("atheris") is not None
    return max(fuzz_by_coverage(name, seconds) if covered else fuzz_at_random(name, seconds=seconds) for name in names)


if __name__ == "__main__":
    sys.exit(main())
