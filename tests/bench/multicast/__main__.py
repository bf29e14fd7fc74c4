"""Claim: the multicast that the planner takes needs at most 1.1 times the bound of all multicasts, and leaves FaaSNet's
tree behind by 1.8 and gloo's broadcast by 1.5.

Hosts of a test bed with links of `--mbit`, a source and 2, 4 and 8 receivers. Each way to send is executed by pulls
over the product's transport, in turn; the store is a host with such a link. gloo is torch.distributed's broadcast of
the whole model as one tensor, and of as many tensors as there are blocks. Every block's checksum is compared. M/B is
one transfer of the whole model to one receiver in the same run; the bound is M/B x (1 + (⌈log₂ N⌉ - 1) / b), N with
the source. Three rounds take nine minutes on a machine that does nothing else; `--receivers` takes them in parts, whose
files are drawn together.

Run: python -m tests.bench.multicast [--receivers N ...] [--mbit RATE] [--mib SIZE] [--json FILE] [--chart PNG]
     [--rounds N] --no-peer
     python -m tests.bench.multicast --no-peer --draw FILE ... --chart PNG
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fleetstart.controller.planner.multicast.topologies import chain
from fleetstart.prefetcher.fetch.pulls import WINDOW
from tests.bench.harness.samples import ROOT, Report, cpu_times, fine, median, parse_options, progress, spread
from tests.bench.multicast import chart
from tests.bench.multicast.ways import (
    CHAIN,
    GLOO,
    GLOO_BLOCKS,
    PIPELINE,
    SEQUENTIAL,
    TREE,
    WAYS,
    Pulls,
    bound_s,
    planned_way,
    predicted_s,
    pulls_of,
)
from tests.testbed.network import Network

RECEIVERS = (2, 4, 8)
BLOCKS = (4, 8, 16, 32, 64)
BLOCKS_USUAL = 32
"""Of the ways that are measured with one number of blocks."""
CHUNK_BYTES = 64 * 1024
"""Unit of pulls and of what is passed on; in proportion to the links, as 4 MiB are to 6 Gbit/s."""
MBIT, MIB_USUAL = 100.0, 16
"""Links so slow that their bytes leave most of two cores idle at eight receivers: `cores_busy` says whether they do."""
TICKS = os.sysconf("SC_CLK_TCK")
KEPT = 32
"""Arrivals of a receiver that are kept of each run, about."""
SOON_S = 0.05
"""From the word to start until the start, so that every process has it."""
MIB = 1024 * 1024


class Process:
    """A node's process on a host of the bed."""

    def __init__(self, network: Network, host: str, module: str, *argv: str) -> None:
        command = network.entered(host, [sys.executable, "-m", module, *argv])
        env = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=env, text=True
        )

    def tell(self, **command: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a node ended with {self._process.wait(10)}")
        return json.loads(line)

    def ask(self, **command: Any) -> Any:
        self.tell(**command)
        return self.answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)


class Fleet:
    """A source and its receivers, the first of the bed's hosts, with gloo's ranks beside them."""

    def __init__(self, network: Network, receivers: int, size_bytes: int) -> None:
        self.network, self.receivers, self.size_bytes = network, receivers, size_bytes
        self.hosts = list(network.addresses)[: receivers + 1]
        self.nodes = [Process(network, host, "tests.bench.multicast.node") for host in self.hosts]
        source = f"{network.addresses[self.hosts[0]]}:29500"
        self.ranks = [
            Process(network, host, "tests.bench.multicast.gloo", source, str(rank), str(len(self.hosts)))
            for rank, host in enumerate(self.hosts)
        ]
        for rank in self.ranks:
            rank.answer()

    def close(self) -> None:
        for process in (*self.nodes, *self.ranks):
            process.close()

    def pull(self, parts: list[Pulls], *, in_turn: bool = False) -> list[list[float]]:
        """Executes pulls; arrivals of each receiver's chunks, ascending, after the start. `parts` by node; `in_turn`:
        a receiver begins when the one before it has ended."""
        chunks = self.size_bytes // CHUNK_BYTES
        held = [
            node.ask(
                do="hold", host=self.network.addresses[host], chunks=chunks, chunk_bytes=CHUNK_BYTES,
                whole=not number,             )
            for number, (node, host) in enumerate(zip(self.nodes, self.hosts, strict=True))
        ]  # fmt: skip
        at = [(self.network.addresses[host], found["port"]) for host, found in zip(self.hosts, held, strict=True)]
        for node, part in zip(self.nodes, parts, strict=True):
            node.ask(do="connect", peers=[at[peer] for peer in part.peers], pulls=part.pulls)
        pulling = [number for number, part in enumerate(parts) if part.pulls]
        at_s = time.monotonic() + SOON_S
        answers = []
        for number in pulling:
            self.nodes[number].tell(do="pull", at_s=at_s)
            if in_turn:
                answers.append(self.nodes[number].answer())
        if not in_turn:
            answers = [self.nodes[number].answer() for number in pulling]
        for node in self.nodes:
            node.ask(do="end")
        right = dict(enumerate(held[0]["checksums"]))
        for answer in answers:
            arrived = {chunk: checksum for chunk, _, checksum in answer["arrivals"]}
            if answer["failed"] or arrived != right or len(answer["arrivals"]) != chunks:
                why = answer["failed"] or "wrong bytes"
                raise RuntimeError(f"a receiver has {len(arrived)} of {chunks} chunks: {why}")
        return [sorted(found_s - at_s for _, found_s, _ in answer["arrivals"]) for answer in answers]

    def broadcast(self, blocks: int) -> list[list[float]]:
        at_s = time.monotonic() + SOON_S * 4
        for rank in self.ranks:
            rank.tell(blocks=blocks, block_bytes=self.size_bytes // blocks, at_s=at_s)
        answers = [rank.answer() for rank in self.ranks]
        if failed := [answer["failed"] for answer in answers if answer["failed"]]:
            raise RuntimeError(f"gloo: {failed[0]}")
        return [sorted(found_s - at_s for _, found_s, _ in answer["arrivals"]) for answer in answers[1:]]

    def send(self, way: str, blocks: int) -> list[list[float]]:
        if way in (GLOO, GLOO_BLOCKS):
            return self.broadcast(1 if way == GLOO else blocks)
        schedule = WAYS[way](range(self.receivers + 1), range(blocks))
        chunks = self.size_bytes // CHUNK_BYTES // blocks
        parts = [pulls_of(schedule, node, chunks) for node in range(self.receivers + 1)]
        return self.pull(parts, in_turn=way == SEQUENTIAL)

    def one_transfer_s(self) -> float:
        """M/B: the whole model to one receiver, in the usual blocks."""
        parts = [Pulls([], []) for _ in range(self.receivers + 1)]
        parts[1] = pulls_of(chain(range(2), range(BLOCKS_USUAL)), 1, self.size_bytes // CHUNK_BYTES // BLOCKS_USUAL)
        return self.pull(parts)[0][-1]


def more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mbit", type=float, default=MBIT, help="rate of each link, each way")
    parser.add_argument("--mib", type=int, default=MIB_USUAL, help="size of the model")
    parser.add_argument("--chart", type=Path, metavar="PNG", help="where to draw first and last blocks")
    parser.add_argument("--receivers", type=int, nargs="+", choices=RECEIVERS, help="numbers of receivers; default all")
    parser.add_argument(
        "--draw", type=Path, nargs="+", metavar="FILE", help="draw what was measured before, and measure nothing"
    )


def main() -> None:
    options = parse_options(__doc__, rounds=3, quick_rounds=1, more=more)
    extra = options.extra
    if extra["draw"] is not None:
        return chart.draw(together(extra["draw"]), extra["chart"])
    report = Report("the multicast that the planner takes needs at most 1.1 times the bound of all multicasts")
    counts = extra["receivers"] or (RECEIVERS[:1] if options.quick else RECEIVERS)
    size_bytes = (8 if options.quick else extra["mib"]) * MIB
    report.setup = {
        "mbit": extra["mbit"], "size_bytes": size_bytes, "pulls_at_once": WINDOW, "blocks": BLOCKS,
        "receivers": counts, "rounds": options.rounds,
    }  # fmt: skip
    network = Network([f"node-{number}" for number in range(max(counts) + 1)], prefix="10.79.0")
    try:
        for host in network.addresses:
            network.limit(host, extra["mbit"])
        for receivers in counts:
            report.samples[str(receivers)] = measure(network, receivers, size_bytes, options.rounds)
            tell(report, receivers)
    finally:
        network.close()
    report.save(options.json)
    if extra["chart"] is not None:
        chart.draw({"samples": report.samples, "setup": report.setup}, extra["chart"])


def together(files: list[Path]) -> dict[str, Any]:
    """Samples of several runs, each of other numbers of receivers."""
    runs = [json.loads(file.read_text()) for file in files]
    return {"samples": {receivers: part for run in runs for receivers, part in run["samples"].items()}}


def measure(network: Network, receivers: int, size_bytes: int, rounds: int) -> dict[str, Any]:
    fleet = Fleet(network, receivers, size_bytes)
    cases = [(PIPELINE, blocks) for blocks in BLOCKS]
    cases += [(way, BLOCKS_USUAL) for way in (*WAYS, GLOO, GLOO_BLOCKS) if way != PIPELINE]
    one_s: list[float] = []
    arrivals: dict[str, list[list[list[float]]]] = {f"{way}, {blocks}": [] for way, blocks in cases}
    begun_s, begun = time.monotonic(), cpu_times()
    try:
        for number in range(rounds):
            for way, blocks in cases:
                progress(f"{receivers} receivers, round {number + 1} of {rounds}: {way}, {blocks} blocks")
                if way == PIPELINE:
                    one_s.append(fleet.one_transfer_s())
                arrivals[f"{way}, {blocks}"].append([thinned(one) for one in fleet.send(way, blocks)])
    finally:
        fleet.close()
    busy = (cpu_times().busy - begun.busy) / TICKS / (time.monotonic() - begun_s)
    return {"one_transfer_s": one_s, "arrivals_s": arrivals, "cores_busy": busy}


def thinned(arrivals: list[float]) -> list[float]:
    """The first arrival, some in equal distances and the last: what is kept shall not be large."""
    kept = arrivals[:1] if len(arrivals) < KEPT else arrivals[:: len(arrivals) // KEPT]
    return [round(found_s, 4) for found_s in (*kept, arrivals[-1])]


def tell(report: Report, receivers: int) -> None:
    found = report.samples[str(receivers)]
    chunks = report.setup["size_bytes"] // CHUNK_BYTES
    one_s = median(found["one_transfer_s"])
    times = {case: [max(map(max, run)) for run in runs] for case, runs in found["arrivals_s"].items()}
    taken = planned_way(receivers, BLOCKS_USUAL)
    ours_s = median(times[f"{taken}, {BLOCKS_USUAL}"])
    rows = [["way, blocks", "all are whole after, s", "over M/B", "predicted", "over the bound", "over the one taken"]]
    rows.append(["M/B: one transfer", spread(found["one_transfer_s"]), "1.00", "", "", ""])
    for case, seconds in times.items():
        way, _, count = case.rpartition(", ")
        blocks, middle_s = int(count), median(seconds)
        predicted = fine(predicted_s(way, receivers, blocks, chunks)) if way in WAYS else ""
        over_bound = fine(middle_s / bound_s(one_s, receivers, blocks)) if way in (PIPELINE, CHAIN) else ""
        rows.append([case, spread(seconds), fine(middle_s / one_s), predicted, over_bound, fine(middle_s / ours_s)])
    report.tell(f"{receivers} receivers; the planner takes: {taken}, {BLOCKS_USUAL}", rows)
    tree_s, gloo_s = (median(times[f"{way}, {BLOCKS_USUAL}"]) for way in (TREE, GLOO))
    print(f"\n{found['cores_busy']:.1f} cores were busy, with what else ran: if all were, no link was the limit.")
    print(f"The {taken} is ahead of the tree by {tree_s / ours_s:.2f} and of gloo by {gloo_s / ours_s:.2f}.")


if __name__ == "__main__":
    main()
