"""Claim: weights move at the speed of the hardware, verified, and at a fraction of others' CPU time.

One checkpoint in the shape of a Llama (201 tensors of noise, fp16; its files are made on a disk and removed again), in
five parts, each interleaved with its baselines in shuffled rounds; ratios are taken round by round:

- disk: local disk → usable tensors. At least 95% of fio with huge pages, 2 × safetensors, 4 × torch.load, ahead of
  every peer loader that runs here, at a tenth of their CPU time.
- segment: segment → 201 tensors in a new process, in less than 2 ms, and a second worker costs no memory for weights.
- store: object store → segment, at 90% of a raw socket reader's rate and 1.3 × its CPU time.
- ready: store → worker ready in 1.1 × the slower of the fetch alone and the start alone.
- checksum: verification costs 10% of the throughput at most; and which checksum.

Each part's file says what is compared with what, and what is not comparable.

Run: python -m tests.bench.weights [--only PART,...] [--size SHAPE] [--json FILE] [--quick] [--rounds N]
     [--peer-python PATH | --no-peer]
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType

from tests.bench.harness import llama
from tests.bench.harness.caches import disk_folder, fresh_memory_bytes_per_s
from tests.bench.harness.samples import Report, fine, parse_options, progress
from tests.bench.weights import checksum, disk, ready, segment, store
from tests.bench.weights.files import make_files
from tests.bench.weights.loaders import OUR_WORKER, Loaders, module, peer_loaders

PARTS = ("disk", "segment", "store", "ready", "checksum")
SHAPE, QUICK_SHAPE = "1.7B", "17M"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default=",".join(PARTS), metavar="PART,...", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--size", choices=llama.SHAPES, help=f"parameters; default {SHAPE}, {QUICK_SHAPE} with --quick")


def main() -> None:
    options = parse_options(__doc__, rounds=7, quick_rounds=1, more=add_options)
    chosen = options.extra["only"].split(",")
    if unknown := set(chosen) - set(PARTS):
        sys.exit(f"no such part: {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, _end)
    shape = options.extra["size"] or (QUICK_SHAPE if options.quick else SHAPE)
    report = Report("weights move at the speed of the hardware, verified, at a fraction of others' CPU time")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fs-bench-", dir=disk_folder())))
        report.setup = {"shape": shape, "fresh_memory_gb_per_s": round(fresh_memory_bytes_per_s() / 1e9, 2)}
        progress(f"writing {llama.SHAPES[shape].size_bytes / 1e9:.2f} GB of weights")
        files = make_files(folder, llama.SHAPES[shape])
        if {"disk", "segment"} & set(chosen):
            peers = stack.enter_context(peer_loaders(options.peer_python))
            worker = Loaders(stack.enter_context(module(OUR_WORKER)))
            report.setup["peers"] = peers.about
        for part in chosen:
            if part == "disk":
                disk.run(report, options, files, worker, peers)
            elif part == "segment":
                segment.run(report, options, files, worker, peers)
            elif part == "store":
                store.run(report, options, files)
            elif part == "ready":
                ready.run(report, options, files)
            else:
                checksum.run(report, options, files)
    print(f"\nMemory that nobody had used came at {fine(report.setup['fresh_memory_gb_per_s'])} GB/s.")
    report.save(options.json)


def _end(_: int, __: FrameType | None) -> None:
    """Ends the run as ctrl-C does: files and huge pages go, processes end."""
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()
