"""Benchmark of object store → segment: the raw socket reader is the ceiling, boto3 the usual way, and ours.

All read the same objects from the same server on loopback, which has them in the page cache; the server's CPU time is
not counted, but it runs on the same cores. Memory is there and touched before the clock starts, on every side.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass, field
from functools import partial

from tests.bench.harness.range_server import BUCKET, credentials, serving
from tests.bench.harness.samples import Options, Report, fine, median, spread
from tests.bench.weights import ours
from tests.bench.weights.files import Files, in_rounds, record
from tests.bench.weights.loaders import Sample, module
from tests.bench.weights.store_clients import CLIENTS

CEILING = "raw sockets"
OURS = "fleetstart"
SHARE_AIM, CPU_AIM = 0.9, 1.3
BLOCK_BYTES = 1 << 20


@dataclass(slots=True)
class Store:
    files: Files
    url: str
    node: ours.Node
    expected: str = ""
    """sha256 of what a client must have; asked for while samples are not kept."""
    digests: dict[str, str] = field(default_factory=dict)

    def client(self, name: str) -> Sample:
        objects = [(f"{self.files.prefix}/{path.name}", path.stat().st_size) for path in self.files.parts]
        with module("tests.bench.weights.store_clients", env=credentials(self.url)) as talk:
            talk.ask(client=name, url=self.url, bucket=BUCKET, objects=objects, digest=name not in self.digests)
            answer = talk.ask(go=True)
        if self.digests.setdefault(name, answer.get("digest", "")) != self.expected:
            raise RuntimeError(f"{name} has other bytes than the store")
        return Sample(answer["ready_s"], answer["cpu_s"])

    def ours(self) -> Sample:
        self.node.forget()
        return self.node.fill(self.files.checkpoint)


def run(report: Report, options: Options, files: Files) -> None:
    whole = hashlib.sha256()
    for path in files.parts:
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                whole.update(block)
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(serving(files.root))
        node = stack.enter_context(ours.node(f"s3://{BUCKET}", files.size_bytes, env=credentials(url)))
        store = Store(files, url, node, whole.hexdigest())
        runners = {name: partial(store.client, name) for name in CLIENTS}
        found = in_rounds(options, {OURS: store.ours, **runners}, "store")
        report.setup["store"] = {"server": "range_server.c, loopback", "node": node.facts()}
    record(report, "store", found)
    tell(report, files, found)


def tell(report: Report, files: Files, found: dict[str, list[Sample]]) -> None:
    rows = [["store → segment", "GB/s", f"of {CEILING}", "CPU s/GB", f"of {CEILING}'s"]]
    gigabytes = files.size_bytes / 1e9
    ceiling = found[CEILING]
    shares: dict[str, tuple[float, float]] = {}
    for name, samples in found.items():
        if not samples:
            continue
        share = median([best.ready_s / one.ready_s for best, one in zip(ceiling, samples, strict=True)])
        cpu = median([one.cpu_s / best.cpu_s for best, one in zip(ceiling, samples, strict=True)])
        shares[name] = (share, cpu)
        rows.append(
            [
                name,
                spread([gigabytes / one.ready_s for one in samples]),
                f"{fine(share)}×",
                fine(median([one.cpu_s for one in samples]) / gigabytes),
                f"{fine(cpu)}×",
            ]
        )
    report.tell("Object store into memory", rows)
    if OURS in shares:
        share, cpu = shares[OURS]
        holds = share >= SHARE_AIM and cpu <= CPU_AIM
        print(
            f"\nThe claim {'holds' if holds else 'does not hold'}: {share:.0%} of the rate, {cpu:.2f} × the CPU time."
        )
