"""Claim: a start over four hosts brings the first token 3.4 times as soon as one host that hides all but its fetch.

On a test bed: four hosts with links of a known rate, a store without limit, everything on this one machine. Parts:

- ttft: first token of a cold start without overlap, overlapped on one host, pipelined over two, three and four; of the
  chat example and of a synthetic Llama of 1.1 GB (HydraServe, figures 7 and 8).
- down: a long generation, alone and four at once, that begins on a pipeline of four and is consolidated, against one
  that stays a pipeline (HydraServe, figure 12); and the largest gap that its reader sees.
- up: bursts of 8, 16 and 32 calls, answered by pipelines that become several workers, against workers that each start
  alone (HydraServe, figure 14).
- scale: from one worker, and two, of a synthetic Llama of 96 MB to one a host, fed by peers, serving while they load,
  against a multicast that serves when it is over, and against each from the store (λScale, figures 9 to 11).

With --quick `down` and `scale` are left out, unless they are asked for.

Before each sample every host forgets everything; the store has its files in the page cache. `--chart` draws the first
part's medians from a file that was written before, or from this run's, and `--ramp` tokens a second of the last; both
take matplotlib.

Run: python -m tests.bench.coldstart [--only PART,...] [--mbit RATE] [--json FILE] [--chart PNG] [--quick] [--rounds N]
     python -m tests.bench.coldstart --no-peer --draw FILE [--chart PNG] [--ramp PNG]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

from tests.bench.coldstart import chart, down, ramp, scale, ttft, up
from tests.bench.coldstart.fleet import NODE, QUICK_NODE, Fleet
from tests.bench.coldstart.models import NOISE, QUICK_NOISE, SCALED_NOISE, chat_example, noise
from tests.bench.harness.caches import disk_folder
from tests.bench.harness.samples import Report, parse_options, progress
from tests.testbed import Testbed, why_not

PARTS = ("ttft", "down", "up", "scale")
QUICK_PARTS = ("ttft", "up")
HOSTS, QUICK_HOSTS = 4, 2
MBIT = 200.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", metavar="PART,...", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--mbit", type=float, help=f"of each host's link; default {MBIT:g}")
    parser.add_argument(
        "--models", metavar="MODEL,...", help="of the first part; default chat,noise, noise with --quick"
    )
    parser.add_argument("--hosts", type=int, help=f"default {HOSTS}")
    parser.add_argument("--copies", type=int, nargs="+", help="workers from which the part `scale` begins; default 1 2")
    parser.add_argument(
        "--cores",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of a core for each host's workers in `scale`; 0: no limit",
    )
    parser.add_argument("--chart", type=Path, metavar="PNG", help="where to draw the first part")
    parser.add_argument("--ramp", type=Path, metavar="PNG", help="where to draw the part `scale`")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="only draw, what an earlier run wrote there")


def main() -> None:
    options = parse_options(__doc__, rounds=5, quick_rounds=1, more=add_options)
    extra = options.extra
    if extra["draw"] is not None:
        return _draw(json.loads(extra["draw"].read_text()), extra["chart"], extra["ramp"])
    usual = QUICK_PARTS if options.quick else PARTS
    chosen = extra["only"].split(",") if extra["only"] else usual
    if unknown := set(chosen) - set(PARTS):
        sys.exit(f"no such part: {', '.join(sorted(unknown))}")
    if reason := why_not():
        sys.exit(f"no test bed here: {reason}")
    signal.signal(signal.SIGTERM, _end)
    mbit = extra["mbit"] or MBIT
    node = QUICK_NODE if options.quick else NODE
    hosts = extra["hosts"] or (QUICK_HOSTS if options.quick and "scale" not in chosen else HOSTS)
    names = (extra["models"] or ("noise" if options.quick else "chat,noise")).split(",")
    report = Report("the first token of a cold start comes from four hosts 3.4 times as soon as from one")
    report.setup = {"hosts": hosts, "mbit": mbit, "cores": os.cpu_count(), "node": node, "cores_a_host": extra["cores"]}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fs-bench-", dir=disk_folder())))
        fleet = Fleet(stack.enter_context(Testbed(nodes=hosts, mbit=mbit, env=node, nodes_down=True)))
        models = [noise(folder, QUICK_NOISE)] if options.quick else [chat_example()]
        if not options.quick and "ttft" in chosen and "noise" in names:
            models.append(noise(folder, NOISE))
        crowd = up.crowded(models[0], hosts)
        few_to_all = [scale.scaled(noise(folder / "scaled", SCALED_NOISE), hosts)] if "scale" in chosen else []
        more = [*([crowd] if "up" in chosen else []), *few_to_all]
        for model in [*models, *more]:
            progress(f"deploying {model.title}")
            fleet.deploy(model)
        if "ttft" in chosen:
            ttft.run(report, options, fleet, [model for model in models if model.name in names])
        if "down" in chosen:
            down.run(report, options, fleet, models[0])
        if "up" in chosen:
            up.run(report, options, fleet, crowd)
        for model in few_to_all:
            for copies in extra["copies"] or scale.COPIES:
                scale.run(report, options, fleet, model, copies)
    report.save(options.json)
    if extra["chart"] is not None or extra["ramp"] is not None:
        _draw({"samples": report.samples, "setup": report.setup}, extra["chart"], extra["ramp"])


def _draw(found: Any, bars: Path | None, lines: Path | None) -> None:
    if bars is not None or lines is None:
        chart.draw(found, bars)
    if lines is not None:
        ramp.draw(found, lines)


def _end(_: int, __: FrameType | None) -> None:
    """Ends the run as ctrl-C does: hosts go, processes end."""
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()
