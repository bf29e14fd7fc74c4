"""Claim: what was built since a commit costs a call and a wake-up at most 5%.

Two releases of this repository, each a wheel in an environment of its own (`tests.upgrade.builds`; `.` is this checkout
as it is installed), with a system each, side by side. They take turns within each round, and who begins alternates: a
warm call of `hello` through the gateway and straight to its worker, the wake-up of `hello` from zero by a spare worker,
and the first token of `chat`, hot and woken with its weights in memory. Beside the calls stands what each cost the
controller in processor time, and beside the wake-ups their phases: they tell where a difference comes from. Each is
compared as a ratio of medians, later to earlier, and as the median of the ratios of the rounds, which what disturbs
both at once does not move.

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
from tests.bench.harness.timelines import phases_ms
from tests.bench.harness.wire import Answer, Connection
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
        before_ms = system.processor_ms("controller")
        calls_ms = [through.post(path, BODY).expect().total_ms for _ in range(CALLS_A_TURN)]
        return {
            "warm call through the gateway": calls_ms,
            "of it processor time of the controller": [(system.processor_ms("controller") - before_ms) / CALLS_A_TURN],
            "the same call, straight": [straight.send(target.raw).expect().total_ms for _ in range(CALLS_A_TURN)],
        }

    turn()
    one.turns["gateway"] = turn


def open_hello(stack: contextlib.ExitStack, one: Release) -> None:
    system = stack.enter_context(running("python", fs=one.fs, FS_POOL_SIZE="1"))
    path = system.deploy(str(one.examples / "hello" / "handler.py"), "--keep-alive", "0.2")

    def turn() -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for _ in range(WAKES_A_TURN):
            answer = _woken(system, path)
            add(found, "hello wakes from zero", answer.total_ms)
            _add_phases(found, "hello", system, answer, answer.ended_ns)
        return found

    turn()
    one.turns["hello"] = turn


def add(found: dict[str, list[float]], what: str, ms: float) -> None:
    found.setdefault(what, []).append(ms)


def _add_phases(found: dict[str, list[float]], name: str, system: System, answer: Answer, ended_ns: int) -> None:
    trace = system.trace(answer.headers["x-request-id"])
    for phase, ms in phases_ms(trace, sent_ns=answer.sent_ns, ended_ns=ended_ns).items():
        add(found, f"of {name}'s wake-up: {phase}", ms)


def _woken(system: System, path: str) -> Answer:
    system.wait_asleep("hello")
    with system.connect() as connection:  # one that was idle for long would be closed by now
        answer = connection.post(path, BODY).expect()
    if answer.headers["fs-start"] == "hot":
        raise RuntimeError("the worker was there already: nothing was woken")
    return answer


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
        found = {"chat wakes, first token": [woken.ttft_ms]}
        _add_phases(found, "chat", system, woken, woken.token_ns)
        return found | {"chat hot, first token": hot}

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
    for what in dict.fromkeys((*after.rounds, *before.rounds)):
        old, new = before.rounds.get(what, []), after.rounds.get(what, [])
        if len(old) == len(new):
            each = [median(later) / median(earlier) for earlier, later in zip(old, new, strict=True)]
            ratios = [fine(median(after.all_ms(what)) / median(before.all_ms(what))), spread(each)]
        else:  # a phase that a release does not have in each of its wake-ups
            ratios = ["–", "–"]
        cells = [spread(one.all_ms(what)) if what in one.rounds else "–" for one in (before, after)]
        rows.append([what, *cells, *ratios])
    report.tell(f"{before.title} → {after.title}", rows)


if __name__ == "__main__":
    main()
