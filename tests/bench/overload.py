"""Claim: at four times what its workers can do, a function keeps its goodput, answers whom it lets in within their
deadline, and turns the others away in milliseconds with a Retry-After that turns out right.

Two workers of four places each run a handler that sleeps for 50 to 150 ms, so that the capacity is the places' and not
the cores'. A closed loop of as many callers as places says what it is; then an open loop in this process, which is not
the server's, brings that rate and four times that rate. A call may wait for a worker for a second, and take two.

A refused call's Retry-After is held against the time at which a call in its place would have had its turn: when the
last one that was let in before it had its own. In the end, some of those who were refused last call again at the told
time, when nobody else calls any more: the error then is what they had to wait beyond it.

Run: python -m tests.bench.overload [--json FILE] [--quick]
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.bench.harness.open_loop import OpenLoop, Sent
from tests.bench.harness.samples import Report, fine, median, parse_options, percentile, progress
from tests.bench.harness.system import System, running
from tests.bench.harness.wire import request

HANDLER = """
import asyncio, random
from fleetstart.runtime import Scale, function

@function(memory="64MiB", concurrency=4, timeout_s=2.0, queue_timeout_s=1.0,
          scale=Scale(min=2, max=2, keep_alive_s=600))
async def naps():
    await asyncio.sleep(random.uniform(0.05, 0.15))
    return "rested"
"""
PLACES = 8
DEADLINE_S = 2.0
FACTORS = (1, 4)
CALLS_MOST = 20_000
LAST_S = 0.1
"""Before the end of the load: those who were refused then come again; nobody comes between."""


@contextlib.contextmanager
def deployed() -> Iterator[tuple[System, OpenLoop]]:
    with running("python") as system, tempfile.TemporaryDirectory(prefix="fs-bench-") as folder:
        handler = Path(folder) / "handler.py"
        handler.write_text(HANDLER)
        path = system.deploy(str(handler))
        system.wait("two workers", lambda: len(ready(system)) == 2)
        loop = OpenLoop(system.host, system.port, request("POST", path, "localhost", {}, system.shown))
        try:
            yield system, loop
        finally:
            loop.close()


def ready(system: System) -> list[Any]:
    return [worker for worker in system.function("naps")["workers"] if worker["state"] == "ready"]


async def capacity(client: OpenLoop, seconds: float) -> float:
    """Calls a second of as many callers as there are places."""
    loop = asyncio.get_running_loop()
    ends_s, answered = loop.time() + seconds, 0

    async def caller() -> None:
        nonlocal answered
        while loop.time() < ends_s:
            (call,) = await client.run([loop.time()])
            answered += call.status == 200 and call.ended_s <= ends_s

    async with asyncio.TaskGroup() as group:
        for _ in range(PLACES):
            group.create_task(caller())
    return answered / seconds


async def at_rate(client: OpenLoop, rate: float, seconds: float) -> list[Sent]:
    count = min(CALLS_MOST, round(rate * seconds))
    begun_s = asyncio.get_running_loop().time() + 0.01
    return await client.run(begun_s + number / rate for number in range(count))


async def at_rate_and_again(client: OpenLoop, rate: float, seconds: float) -> tuple[list[Sent], list[Sent], list[Sent]]:
    """All calls, the last refused ones, and the retries of these at the told time, when there are no other calls."""
    loop = asyncio.get_running_loop()
    begun_s = loop.time() + 0.01
    count = min(CALLS_MOST, round(rate * seconds))
    last_s = begun_s + count / rate - LAST_S
    refused: list[Sent] = []
    again: list[asyncio.Task[list[Sent]]] = []

    def heard(call: Sent) -> None:
        if call.retry_s and call.sent_s > last_s and len(refused) < PLACES:
            refused.append(call)
            again.append(loop.create_task(client.run([call.sent_s + call.retry_s])))

    calls = await client.run((begun_s + number / rate for number in range(count)), heard)
    return calls, refused, [(await task)[0] for task in again]


def retry_errors(calls: Sequence[Sent]) -> list[float]:
    """Error of each Retry-After amid the load, (told - actual) / actual: actual is the last accepted one's turn."""
    let_in = sorted((call.sent_s, call.queue_ms / 1e3) for call in calls if call.status == 200)
    times = [sent_s for sent_s, _ in let_in]
    errors = []
    for call in calls:
        place = bisect.bisect_right(times, call.sent_s) - 1
        if not call.retry_s or place < 0:
            continue
        sent_s, queue_s = let_in[place]
        actual_s = sent_s + queue_s - call.sent_s
        if actual_s > 0.1:
            errors.append((call.retry_s - actual_s) / actual_s)
    return errors


def again_errors(refused: Sequence[Sent], again: Sequence[Sent]) -> list[float]:
    """Wait of retries that were let in, per second of the Retry-After that they had followed."""
    return [
        second.queue_ms / 1e3 / first.retry_s
        for first, second in zip(refused, again, strict=True)
        if second.status == 200
    ]


def main() -> None:
    options = parse_options(__doc__, rounds=3, quick_rounds=1)
    seconds = 1.0 if options.quick else 10.0
    report = Report("at four times its capacity a function keeps its goodput, and refuses in milliseconds, truly")
    rounds: list[dict[str, Any]] = []
    with deployed() as (_, client):
        for number in range(options.rounds):
            progress(f"round {number + 1} of {options.rounds}")
            rounds.append(asyncio.run(one_round(client, seconds)))
            client.close()
    report.setup = {"places": PLACES, "seconds": seconds, "deadline_s": DEADLINE_S}
    report.samples = {"rounds": rounds}
    tell(report, rounds)
    report.save(options.json)


async def one_round(client: OpenLoop, seconds: float) -> dict[str, Any]:
    known = await capacity(client, seconds / 3)
    once = await at_rate(client, known, seconds)
    four, refused, again = await at_rate_and_again(client, 4 * known, seconds)
    client.close()
    return {
        "capacity_per_s": known,
        "1": summary(once, known),
        "4": summary(four, 4 * known),
        "retry_error": retry_errors(four)[:2000],
        "again_accepted": sum(call.status == 200 for call in again) / max(1, len(again)),
        "again_error": again_errors(refused, again),
    }


def summary(calls: Sequence[Sent], rate: float) -> dict[str, Any]:
    good = [call for call in calls if call.status == 200]
    refused = [call for call in calls if call.code in ("queue_full", "overloaded")]
    begun_s, ended_s = min(call.sent_s for call in calls), max(call.sent_s for call in calls)
    within = sum(call.ended_s <= ended_s for call in good)
    return {
        "rate_per_s": rate,
        "calls": len(calls),
        "goodput_per_s": within / (ended_s - begun_s),
        "good_p50_ms": percentile([call.took_ms for call in good], 0.5) if good else None,
        "good_p99_ms": percentile([call.took_ms for call in good], 0.99) if good else None,
        "refused": len(refused),
        "refusal_p50_ms": percentile([call.took_ms for call in refused], 0.5) if refused else None,
        "refusal_p99_ms": percentile([call.took_ms for call in refused], 0.99) if refused else None,
        "let_in_and_failed": len(calls) - len(good) - len(refused),
        "codes": {code: sum(call.code == code for call in calls) for code in sorted({call.code for call in calls})},
        "generator_late_p99_ms": percentile([call.late_ms for call in calls], 0.99),
    }


def tell(report: Report, rounds: Sequence[dict[str, Any]]) -> None:
    rows = [["open loop", *(f"{factor} × capacity" for factor in FACTORS)]]
    for text, name in (
        ("calls a second", "rate_per_s"),
        ("goodput, calls a second", "goodput_per_s"),
        ("answered: median, ms", "good_p50_ms"),
        ("answered: 99th percentile, ms", "good_p99_ms"),
        ("let in, and not answered in time", "let_in_and_failed"),
        ("refused", "refused"),
        ("refusal: median, ms", "refusal_p50_ms"),
        ("refusal: 99th percentile, ms", "refusal_p99_ms"),
        ("generator late: 99th percentile, ms", "generator_late_p99_ms"),
    ):
        found = [[one[str(factor)][name] for one in rounds] for factor in FACTORS]
        rows.append([text, *("" if None in values else fine(median(values)) for values in found)])
    report.tell("Overload", rows)
    errors = [error for one in rounds for error in one["retry_error"]]
    again = [error for one in rounds for error in one["again_error"]]
    rows = [["Retry-After", "told, against the turn in its place", "came again as told: waited on"]]
    rows.append(["compared", str(len(errors)), str(len(again))])
    for text, share in (("median error", 0.5), ("90th percentile of the error", 0.9)):
        told = f"{percentile([abs(error) for error in errors], share):.0%}" if errors else ""
        rows.append([text, told, f"{percentile(again, share):.0%}" if again else ""])
    within = f"{sum(abs(error) <= 0.3 for error in errors) / len(errors):.0%}" if errors else ""
    rows.append(["within 30%", within, f"{sum(e <= 0.3 for e in again) / len(again):.0%}" if again else ""])
    accepted = median([one["again_accepted"] for one in rounds])
    rows.append(["let in at the told time", "", f"{accepted:.0%}"])
    report.tell("Whether Retry-After was right", rows)


if __name__ == "__main__":
    main()
