"""Claim: what was built since a commit costs a call and a wake-up at most 5%.

Two releases of this repository, each a wheel in an environment of its own (`tests.upgrade.builds`; `.` is this checkout
as it is installed), with a system each, side by side. They take turns within each round, and who begins alternates: a
warm call of `hello` through the gateway and straight to its worker, the wake-up of `hello` from zero by a spare worker,
and the first token of `chat`, hot and woken with its weights in memory. Each is compared as a ratio of medians, later
to earlier, and as the median of the ratios of the rounds, which what disturbs both at once does not move.

Run it where nothing else runs: workers of releases since 2026-11-23 have a quarter of the weight of other groups of
processes, so beside other work they wait longer, which is no cost of a call.

To build both takes minutes (`--build-only` does it ahead), the measurement seven with 30 rounds.

Run: python -m tests.bench.releases --no-peer --before COMMIT [--after COMMIT] [--json FILE] [--quick] [--only NAMES]
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench import chat, gateway
from tests.bench.harness.samples import ROOT, Report, fine, median, parse_options, progress, spread
from tests.bench.harness.system import OWN_FS, System, running
from tests.bench.harness.wire import Connection
from tests.upgrade.builds import FOLDER, build

BODY = {"name": "you"}
CALLS_A_TURN = 40
WAKES_A_TURN = 2
HOT_A_TURN = 3
NAMES = ("gateway", "hello", "chat")


@dataclass(slots=True)
class Release:
    """One release: its systems, and what was measured, in ms, a list a round."""

    title: str
    fs: tuple[str, ...]
    examples: Path
    turns: dict[str, Callable[[], dict[str, list[float]]]] = field(default_factory=dict)
    rounds: dict[str, list[list[float]]] = field(default_factory=dict)

    def turn(self, name: str) -> None:
        for what, took_ms in self.turns[name]().items():
            self.rounds.setdefault(what, []).append(took_ms)

    def all_ms(self, what: str) -> list[float]:
        return [one for round_ in self.rounds[what] for one in round_]


def release(name: str) -> Release:
    """The release of that commit, built if it is not yet; `.` is this checkout."""
    if name == ".":
        return Release("this checkout", OWN_FS, ROOT / "examples")
    built = build(name)
    examples = FOLDER / built.commit[:12] / "source" / "examples"
    weights = examples / "chat" / "weights"
    if not weights.exists():
        weights.symlink_to(ROOT / "examples" / "chat" / "weights")
    return Release(f"{built.commit[:9]} {built.title}", built.fs, examples)


def open_gateway(stack: contextlib.ExitStack, one: Release) -> None:
    system = stack.enter_context(running("python", fs=one.fs))
    flags = ("--keep-alive", "3600", "--max", "1", "--concurrency", "16")
    path = system.deploy(str(one.examples / "hello" / "handler.py"), *flags)
    through = stack.enter_context(system.connect())
    through.post(path, BODY).expect()
    target = gateway.straight(system)
    straight = stack.enter_context(Connection(target.host, target.port))

    def turn() -> dict[str, list[float]]:
        return {
            "warm call through the gateway": [through.post(path, BODY).expect().total_ms for _ in range(CALLS_A_TURN)],
            "the same call, straight": [straight.send(target.raw).expect().total_ms for _ in range(CALLS_A_TURN)],
        }

    turn()
    one.turns["gateway"] = turn


def open_hello(stack: contextlib.ExitStack, one: Release) -> None:
    system = stack.enter_context(running("python", fs=one.fs, FS_POOL_SIZE="1"))
    path = system.deploy(str(one.examples / "hello" / "handler.py"), "--keep-alive", "0.2")

    def turn() -> dict[str, list[float]]:
        return {"hello wakes from zero": [_woken_ms(system, path) for _ in range(WAKES_A_TURN)]}

    turn()
    one.turns["hello"] = turn


def _woken_ms(system: System, path: str) -> float:
    system.wait_asleep("hello")
    with system.connect() as connection:  # one that was idle for long would be closed by now
        answer = connection.post(path, BODY).expect()
    if answer.headers["fs-start"] == "hot":
        raise RuntimeError("the worker was there already: nothing was woken")
    return answer.total_ms


def open_chat(stack: contextlib.ExitStack, one: Release) -> None:
    system = stack.enter_context(running("torch", fs=one.fs))
    path = system.deploy(str(one.examples / "chat" / "handler.py"), "--keep-alive", chat.KEEP_ALIVE_S)
    with system.connect() as connection:
        chat.Ours(system, path, connection).call()

    def turn() -> dict[str, list[float]]:
        system.wait_asleep("chat")
        with system.connect() as connection:
            ours = chat.Ours(system, path, connection)
            woken = ours.call()
            hot = [ours.call().ttft_ms for _ in range(HOT_A_TURN)]
        if woken.headers["fs-start"] != "warm":
            raise RuntimeError(f"the call should have been warm and was {woken.headers['fs-start']}")
        return {"chat wakes, first token": [woken.ttft_ms], "chat hot, first token": hot}

    turn()
    one.turns["chat"] = turn


def options_of_this(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--before", required=True, metavar="COMMIT", help="the earlier release; . is this checkout")
    parser.add_argument("--after", default="HEAD", metavar="COMMIT", help="the later one (HEAD)")
    parser.add_argument("--only", default=",".join(NAMES), help=f"of {', '.join(NAMES)}")
    parser.add_argument("--build-only", action="store_true", help="build both, and measure nothing")


def main() -> None:
    options = parse_options(__doc__, rounds=30, quick_rounds=2, more=options_of_this)
    releases = [release(options.extra["before"]), release(options.extra["after"])]
    if options.extra["build_only"]:
        return
    report = Report("what was built since a commit costs a call and a wake-up at most 5%")
    openers = {"gateway": open_gateway, "hello": open_hello, "chat": open_chat}
    for name in options.extra["only"].split(","):
        with contextlib.ExitStack() as stack:  # one pair of systems at a time: what the others do would be added
            for one in releases:
                openers[name](stack, one)
            for number in range(options.rounds):
                progress(f"{name}: round {number + 1} of {options.rounds}")
                for one in releases[:: 1 if number % 2 else -1]:
                    one.turn(name)
    report.setup = {"before": releases[0].title, "after": releases[1].title, "rounds": options.rounds}
    report.samples = {one.title: one.rounds for one in releases}
    tell(report, *releases)
    report.save(options.json)


def tell(report: Report, before: Release, after: Release) -> None:
    rows = [["ms", "before", "after", "ratio of medians", "median ratio of rounds"]]
    for what, rounds in after.rounds.items():
        old, new = before.all_ms(what), after.all_ms(what)
        each = [median(later) / median(earlier) for earlier, later in zip(before.rounds[what], rounds, strict=True)]
        rows.append([what, spread(old), spread(new), fine(median(new) / median(old)), spread(each)])
    report.tell(f"{before.title} → {after.title}", rows)


if __name__ == "__main__":
    main()
