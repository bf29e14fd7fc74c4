"""Time to first token of a cold start: without overlap, overlapped on one host, and pipelined over two to four.

In a round each comes once, in an order of its own, and before each every host forgets all. The planner chooses the
size among the hosts that are there; which one ran is read from the orders. Beside them the floor of one host,
M/b + one prefill: the checkpoint's bytes at the rate of a plain TCP stream from the store over the same link, measured
in the same round, and the same call to the hot worker.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.bench.coldstart.fleet import Fleet, Generated
from tests.bench.coldstart.models import Model
from tests.bench.coldstart.serial import serial_start
from tests.bench.harness.samples import Options, Report, fine, median, progress, spread

SERIAL, FLOOR = "no overlap", "M/b + one prefill"
SIZES, QUICK_SIZES = (1, 2, 3, 4), (1, 2)
TOKENS = 8
OVERLAP_AIM, PIPELINE_AIM = 1.1, 3.4


def title(size: int) -> str:
    return "overlap, one host" if size == 1 else f"pipeline of {size}"


@dataclass(slots=True)
class Found:
    """Seconds of each row, a value a round; and what else is known of each."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    details: dict[str, list[Any]] = field(default_factory=dict)

    def note(self, row: str, seconds: float, detail: Any = None) -> None:
        self.seconds.setdefault(row, []).append(seconds)
        self.details.setdefault(row, []).append(detail)

    def ratios(self, over: str, under: str) -> list[float]:
        """Round by round."""
        return [a / b for a, b in zip(self.seconds[over], self.seconds[under], strict=True)]


def cold_call(fleet: Fleet, model: Model, size: int) -> tuple[Generated, Any]:
    """A call that is cold on exactly so many hosts, and what its workers tell of their starts."""
    fleet.chill(size)
    generated = fleet.ask(model, tokens=TOKENS)
    workers = fleet.workers(model)
    if generated.start != "cold":
        raise RuntimeError(f"{model.name}: the call should have been cold and was {generated.start}")
    ran_on([worker.order.node for worker in workers], size, model)
    return generated, [worker.about(generated.sent_ns) for worker in workers]


def ran_on(hosts: Collection[str], size: int, model: Model) -> None:
    """RuntimeError unless that many different hosts took part."""
    if len(hosts) != size or len(set(hosts)) != size:
        raise RuntimeError(f"{model.name}: planned over {sorted(hosts)}, and {size} hosts were there")


def run(report: Report, options: Options, fleet: Fleet, models: list[Model]) -> None:
    sizes = QUICK_SIZES if options.quick else SIZES
    for model in models:
        found = Found()
        for number in range(1, options.rounds + 1):
            progress(f"ttft, {model.name}: round {number} of {options.rounds}")
            _round(fleet, model, found, number, sizes, options.quick)
        _tell(report, fleet, model, found, sizes[-1])


def _round(fleet: Fleet, model: Model, found: Found, number: int, sizes: tuple[int, ...], quick: bool) -> None:
    serial = partial(_serial, fleet, model, found, quick)
    runners = [serial, *(partial(_overlapped, fleet, model, found, n) for n in sizes)]
    random.Random(number).shuffle(runners)
    for runner in runners:
        runner()


def _serial(fleet: Fleet, model: Model, found: Found, quick: bool) -> None:
    if not quick:  # it has a node of its own, cold: chilling the others gives it the cores to itself
        fleet.chill(1)
    answer = serial_start(fleet, model)
    found.note(SERIAL, answer.pop("ttft_s"), answer)


def _overlapped(fleet: Fleet, model: Model, found: Found, size: int) -> None:
    generated, workers = cold_call(fleet, model, size)
    found.note(title(size), generated.ttft_s, {"workers": workers, "pieces_s": generated.seconds})
    if size == 1:
        prefill_s = min(fleet.ask(model, tokens=TOKENS).ttft_s for _ in range(2))
        rate = fleet.link_bytes_per_s(model)
        about = {"link_bytes_per_s": rate, "prefill_s": prefill_s}
        found.note(FLOOR, fleet.size_bytes(model) / rate + prefill_s, about)


def _tell(report: Report, fleet: Fleet, model: Model, found: Found, most: int) -> None:
    one = title(1)
    rows = [["cold start", "TTFT, s", "one host's is … × it", f"of {FLOOR}"]]
    for row in (row for row in (SERIAL, *map(title, SIZES), FLOOR) if row in found.seconds):
        ratio, share = median(found.ratios(one, row)), median(found.ratios(row, FLOOR))
        rows.append([row, spread(found.seconds[row]), f"{fine(ratio)}×", f"{fine(share)}×"])
    report.setup.setdefault("models", {})[model.title] = {"object_bytes": fleet.size_bytes(model)}
    report.samples[f"ttft, {model.title}"] = {"seconds": found.seconds, "details": found.details}
    report.tell(f"Time to first token of a cold start: {model.title}", rows)
    above, times = median(found.ratios(one, FLOOR)), median(found.ratios(one, title(most)))
    _claim(above <= OVERLAP_AIM, f"overlap on one host takes {above:.2f} × {FLOOR} (aim: {OVERLAP_AIM})")
    _claim(times >= PIPELINE_AIM, f"{most} hosts are {times:.2f} × as quick as one (aim: {PIPELINE_AIM})")


def _claim(holds: bool, text: str) -> None:
    print(f"The claim {'holds' if holds else 'does not hold'}: {text}.")
