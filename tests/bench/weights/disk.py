"""Benchmark of disk → usable tensors: every page touched, in a fresh process, the files out of the page cache or in it.

fio reads the files of our store with its quickest settings here, into huge pages: the ceiling. Ours is the whole path:
a worker asks a node, gets descriptors and binds tensors while the node reads and verifies. The node's pool of memory is
warm (made and touched before, as in service) or cold (made while the clock runs). Peers read into memory of their own
and verify nothing; "unverified" is ours without its checksums, for comparison with them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.bench.harness.caches import HUGE_PAGE, chill, warm
from tests.bench.harness.samples import Options, Report, fine, median, progress, spread
from tests.bench.weights import fio, ours
from tests.bench.weights.files import Files, in_rounds, record
from tests.bench.weights.loaders import Loaders, Sample
from tests.huge_pages import reserved

OURS = "fleetstart"
LEAST_S = 1e-3
"""Less is a pool in which there was nothing to clear."""
CEILING = "fio"
FIO_AIM, TORCH_AIM, SAFETENSORS_AIM, CPU_AIM = 0.95, 4.0, 2.0, 0.1
SAFETENSORS_FILE = ("safetensors", "fastsafetensors", "Run:ai streamer")
OTHER_FORMATS = {"torch.load": "torch", "torch.load mmap": "torch", "tensorizer": "tensorizer"}
NEEDS = {"fastsafetensors": "fastsafetensors", "tensorizer": "tensorizer", "Run:ai streamer": "runai-model-streamer"}
"""Loader to package; the others are there wherever torch and safetensors are."""


@dataclass(slots=True)
class Disk:
    files: Files
    ready: Callable[[Sequence[Path]], None]
    """Brings files into the page cache, or out of it."""
    touched: set[int] = field(default_factory=set)
    digests: dict[str, str] = field(default_factory=dict)
    """Asked for once a loader, while samples are not kept."""
    cleared_cpu_s: list[float] = field(default_factory=list)

    def fio(self, settings: fio.Settings) -> Sample:
        self.ready(self.files.parts)
        found = fio.read(self.files.parts, settings)
        return Sample(found.seconds, found.cpu_s)

    def peer(self, loaders: Loaders, name: str, path: Path) -> Sample:
        answer = loaders.load(name, lambda _: self.ready([path]), path=str(path), digest=name not in self.digests)
        chill([path])
        return self._sample(name, answer)

    def ours(self, name: str, node: ours.Node, worker: Loaders) -> Sample:
        """A node with a cold pool makes it when the first worker asks, so it is a new one each time."""
        if (cleared_cpu_s := node.forget()) > LEAST_S:
            self.cleared_cpu_s.append(cleared_cpu_s)
        used_s: list[float] = []

        def begin(_: int) -> None:
            self.ready(self.files.parts)
            used_s.append(node.cpu_s())

        question = {"socket": str(node.socket), "checkpoint": self.files.checkpoint}
        answer = worker.load(OURS, begin, **question, digest=name not in self.digests)
        answer["cpu_s"] += node.cpu_s() - used_s[0]
        chill(self.files.parts)  # or the page cache of all loaders would not fit beside the pools
        return self._sample(name, answer)

    def ours_cold(self, worker: Loaders) -> Sample:
        with ours.node(str(self.files.store), self.files.size_bytes, pool="cold") as node:
            return self.ours(f"{OURS}, pool cold", node, worker)

    def _sample(self, name: str, answer: dict[str, object]) -> Sample:
        """One load, whose bytes must be those of all loaders: a sum each time, the sha256 once."""
        self.touched.add(int(str(answer["touched"])))
        if "digest" in answer:
            self.digests[name] = str(answer["digest"])
        if len(self.touched) > 1 or len(set(self.digests.values())) > 1:
            raise RuntimeError(f"{name} has other bytes than the loaders before it")
        return Sample(float(str(answer["ready_s"])), float(str(answer["cpu_s"])))


def run(report: Report, options: Options, files: Files, worker: Loaders, peers: Loaders) -> None:
    paths = {name: files.source for name in SAFETENSORS_FILE if _is_there(peers, name)}
    for name, kind in OTHER_FORMATS.items():
        if _is_there(peers, name):
            paths[name] = files.folder / f"model.{kind}"
            if not paths[name].exists():
                progress(f"writing {paths[name].name}")
                peers.do("save", format=kind, source=str(files.source), target=str(paths[name]))
    absent = {name: "is not installed" for name in NEEDS if not _is_there(peers, name)}
    with contextlib.ExitStack() as stack:
        huge = stack.enter_context(reserved(-(-fio.HUGE_BYTES // HUGE_PAGE)))
        settings = fio.fastest(files.parts, hugetlb=huge)
        if settings is None:
            absent[CEILING] = "may not run here" if fio.installed() else "is not installed"
        node = stack.enter_context(ours.node(str(files.store), files.size_bytes))
        blind = stack.enter_context(ours.node(str(files.store), files.size_bytes, verify=False))
        report.setup["disk"] = {"fio": str(settings), "node": node.facts(), "absent": absent}
        caches = {"cold": chill} if options.quick else {"cold": chill, "warm": warm}
        for title, ready in caches.items():
            disk = Disk(files, ready)
            runners: dict[str, Callable[[], Sample]] = {
                OURS: partial(disk.ours, OURS, node, worker),
                f"{OURS}, unverified": partial(disk.ours, f"{OURS}, unverified", blind, worker),
                f"{OURS}, pool cold": partial(disk.ours_cold, worker),
                **{name: partial(disk.peer, peers, name, path) for name, path in paths.items()},
            }
            if settings is not None and ready is chill:
                runners[CEILING] = partial(disk.fio, settings)
            found = in_rounds(options, runners, f"disk, page cache {title}")
            record(report, f"disk, page cache {title}", found)
            tell(report, files, found, title)
            if disk.cleared_cpu_s:
                cleared = fine(median(disk.cleared_cpu_s) / files.size_bytes * 1e9)
                print(f"\nIn no row: clearing the pool for its next owner, {cleared} CPU s/GB, before the clock.")
        facts = node.facts()
        print(f"The pool: {facts['pages']} pages, slabs of {facts['slab_bytes'] >> 20} MiB. fio: {settings}.")
        for name, why in absent.items():
            print(f"{name} {why}.")


def _is_there(peers: Loaders, name: str) -> bool:
    return bool(peers.about[NEEDS.get(name, "torch")])


def tell(report: Report, files: Files, found: dict[str, list[Sample]], title: str) -> None:
    gigabytes = files.size_bytes / 1e9
    ours_found = found[OURS]
    rows = [["loader", "ready, s", "GB/s", "speed, ours = 1", "CPU s/GB", "CPU, ours = 1"]]
    speeds: dict[str, float] = {}
    cpus: dict[str, float] = {}
    for name, samples in sorted(found.items(), key=lambda item: median([one.ready_s for one in item[1] or [_NEVER]])):
        if not samples:
            rows.append([name, "does not run here", *[""] * 4])
            continue
        if ours_found:
            pairs = list(zip(ours_found, samples, strict=True))
            speeds[name] = median([mine.ready_s / one.ready_s for mine, one in pairs])
            cpus[name] = median([one.cpu_s / mine.cpu_s for mine, one in pairs])
        rows.append(
            [
                name,
                spread([one.ready_s for one in samples]),
                fine(gigabytes / median([one.ready_s for one in samples])),
                f"{fine(speeds[name])}×" if name in speeds else "",
                fine(median([one.cpu_s for one in samples]) / gigabytes),
                f"{fine(cpus[name])}×" if name in cpus else "",
            ]
        )
    report.tell(f"Disk → {files.size_bytes / 1e9:.2f} GB of usable tensors, page cache {title}", rows)
    if title == "cold" and OURS in speeds:
        _judge(speeds, cpus)


_NEVER = Sample(float("inf"), 0.0)


def _judge(speeds: dict[str, float], cpus: dict[str, float]) -> None:
    peers = {name: speed for name, speed in speeds.items() if not name.startswith((OURS, CEILING))}
    said = {
        f"{FIO_AIM:.0%} of fio": CEILING not in speeds or 1 / speeds[CEILING] >= FIO_AIM,
        f"{SAFETENSORS_AIM:g} × safetensors": 1 / peers["safetensors"] >= SAFETENSORS_AIM,
        f"{TORCH_AIM:g} × torch.load": 1 / peers["torch.load"] >= TORCH_AIM,
        "ahead of every peer": max(peers.values()) < 1,
        f"{CPU_AIM:g} of the CPU time of each peer": min(cpus[name] for name in peers) * CPU_AIM >= 1,
    }
    for claim, holds in said.items():
        print(
            f"{claim}: {'holds' if holds else 'does not hold'}"
            + (" (no fio)" if "fio" in claim and CEILING not in speeds else "")
        )
