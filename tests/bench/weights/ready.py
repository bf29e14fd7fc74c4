"""Benchmark of store → worker ready, against the slower of its halves: the fetch alone, the start of a worker alone.

A daemon of its own for each measurement, so that nothing is cached, with a fork server that has imported torch. The
function imports more of it, which takes a core for a second or two, then touches every page of its weights. Alone, it
has no weights; the fetch alone is a node's that has no worker. Twice: over a link that makes the fetch twice as long as
the start, and with a small checkpoint over a link without limit, where the start is the longer.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.contract.sizes import GIB
from tests.bench.harness import llama
from tests.bench.harness.range_server import BUCKET, credentials, serving
from tests.bench.harness.samples import Options, Report, fine, median, progress, spread
from tests.bench.weights import ours
from tests.bench.weights.files import Files, in_rounds, make_files, record
from tests.bench.weights.loaders import Sample
from tests.prefetcher.nodes import Node, Store, call, spec_of
from tests.servers import RedisServer, wait_until

AIM = 1.1
FETCH_OVER_START = 2.0
QUICK_FETCH_S = 1.5
READY_S = 120.0
SLAB_MAX_BYTES = 256 << 20
IMPORTS = "import torch\nimport torch._dynamo\n"
QUICK_IMPORTS = "import torch\n"
CLASS = "\n\nclass Model:\n"
CALL = "    def __call__(self) -> int:\n        return self.touched\n"
ALONE = CLASS + "    touched = 0\n\n" + CALL
WITH_WEIGHTS = (
    CLASS
    + "    def load(self, weights):\n"
    + "        pages = [weights[name].reshape(-1).view(torch.uint8)[::4096] for name in weights]\n"
    + "        self.touched = sum(int(page.sum(dtype=torch.int64)) for page in pages)\n\n"
    + CALL
)


@dataclass(slots=True)
class Ready:
    """One store behind one link."""

    files: Files
    url: str
    redis: RedisServer
    node: ours.Node
    imports: str

    def fetch(self) -> Sample:
        self.node.forget()
        return self.node.fill(self.files.checkpoint)

    def start(self) -> Sample:
        return self._worker({"handler.py": self.imports + ALONE}, None)

    def both(self) -> Sample:
        return self._worker({"handler.py": self.imports + WITH_WEIGHTS}, CheckpointId(self.files.checkpoint))

    def _worker(self, code: dict[str, str], weights: CheckpointId | None) -> Sample:
        bundle = Store(self.files.store).put_bundle(code)
        spec = spec_of(bundle, entry="handler:Model", profile="torch", weights=weights, memory_bytes=2 * GIB)
        with self._daemon() as node:
            began_s = time.perf_counter()
            status = node.wait_for(node.order(spec), "ready", deadline_s=READY_S)
            ready_s = time.perf_counter() - began_s
            code_, body = call(status)
            if code_ != 200 or (weights is not None and int(body) <= 0):
                raise RuntimeError(f"the worker answered {code_}: {body[:200]!r}")
        return Sample(ready_s, 0.0)

    @contextlib.contextmanager
    def _daemon(self) -> Iterator[Node]:
        self.redis.client().flushall()
        with tempfile.TemporaryDirectory(prefix="fs-bench-", dir=self.files.folder) as folder:
            # Room for the weights, and for a slab that they do not fill.
            kept_bytes = self.files.size_bytes + SLAB_MAX_BYTES
            env: dict[str, Any] = {"FS_PROFILES": "torch", "FS_POOL_MEMORY": str(kept_bytes)}
            node = Node(self.redis, f"s3://{BUCKET}", Path(folder) / "home", **credentials(self.url), **env)
            try:
                node.start()
                wait_until(
                    lambda: node.lease().weights_memory.free_bytes >= self.files.size_bytes, READY_S, what="the pool"
                )
                wait_until(lambda: "worker preforked" in node.log(), READY_S, what="a spare worker")
                yield node
            finally:
                node.close()


@contextlib.contextmanager
def _over_a_link(files: Files, bytes_per_s: float, *, quick: bool = False) -> Iterator[Ready]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fs-bench-")))
        redis = RedisServer(folder / "redis")
        stack.callback(redis.close)
        redis.start()
        url = stack.enter_context(serving(files.root, bytes_per_s=bytes_per_s))
        node = stack.enter_context(ours.node(f"s3://{BUCKET}", files.size_bytes, env=credentials(url)))
        yield Ready(files, url, redis, node, QUICK_IMPORTS if quick else IMPORTS)


def run(report: Report, options: Options, files: Files) -> None:
    if options.quick:
        rate = files.size_bytes / QUICK_FETCH_S
    else:
        small = make_files(files.folder / "small", llama.SHAPES["64M"])
        progress("ready: how long a start takes")
        with _over_a_link(small, 0) as ready:
            rate = files.size_bytes / (FETCH_OVER_START * min(ready.start().ready_s for _ in range(2)))
    cases = [(f"{files.size_bytes / 1e9:.2f} GB at {rate / 1e9:.2f} GB/s", files, rate)]
    if not options.quick:
        cases.append((f"{small.size_bytes / 1e9:.2f} GB, no limit", small, 0.0))
    rows = [["store → worker ready", "fetch alone, s", "start alone, s", "both, s", "both / the slower"]]
    ratios: list[float] = []
    for title, one, bytes_per_s in cases:
        with _over_a_link(one, bytes_per_s, quick=options.quick) as ready:
            runners: dict[str, Callable[[], Sample]] = {"fetch": ready.fetch, "start": ready.start, "both": ready.both}
            found = in_rounds(options, runners, f"ready, {title}")
        record(report, f"ready, {title}", found)
        ratio = median(
            [
                both.ready_s / max(fetch.ready_s, start.ready_s)
                for fetch, start, both in zip(found["fetch"], found["start"], found["both"], strict=True)
            ]
        )
        ratios.append(ratio)
        seconds = (spread([one.ready_s for one in found[name]]) for name in runners)
        rows.append([title, *seconds, f"{fine(ratio)}×"])
    report.setup["ready"] = {"cores": os.cpu_count(), "link_bytes_per_s": rate}
    report.tell("From the store to a worker that is ready", rows)
    worst = max(ratios)
    print(f"\nThe claim {'holds' if worst <= AIM else 'does not hold'}: {worst:.2f} × the slower of the two.")
