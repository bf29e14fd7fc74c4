"""Claim: a segment's weights reach a GPU at 90% of the rate of one copy of pinned memory, ahead of loaders of files.

A checkpoint in the shape of a Llama of 1.7 B parameters, 3.4 GB, in the memory of a node, verified: to tensors on the
device in a fresh process whose context is there, every 4 KiB of each read on the device. Loaders of others read the
same tensors out of the page cache; they verify nothing. The ceiling is a copy of as many bytes out of pinned memory.

Run by `python -m tests.bench.gpu`, or alone:
python -m tests.bench.gpu.load [--device cpu] [--quick] [--json FILE] [--rounds N] [--peer-python PATH | --no-peer]
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from tests.bench.harness import llama
from tests.bench.harness.caches import disk_folder, warm
from tests.bench.harness.samples import Report, fine, median, parse_options, spread
from tests.bench.weights import ours
from tests.bench.weights.files import Files, in_rounds, make_files, record
from tests.bench.weights.loaders import OUR_WORKER, Loaders, Sample, module, peer_loaders

OURS, PINNED = "fleetstart, segment", "one copy of pinned memory"
PEERS = ("safetensors", "fastsafetensors", "Run:ai streamer", "InstantTensor")
SHAPE, QUICK_SHAPE = "1.7B", "17M"
AIM = 0.9


def pinned_copy(size_bytes: int, device: str) -> Sample:
    """A copy to the device; on the CPU, to memory of the same process."""
    source = torch.ones(size_bytes, dtype=torch.uint8, pin_memory=device == "cuda")
    target = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    _finish(device)
    began_s, used_s = time.perf_counter(), time.process_time()
    target.copy_(source, non_blocking=True)
    _finish(device)
    return Sample(time.perf_counter() - began_s, time.process_time() - used_s)


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def of_ours(worker: Loaders, node: ours.Node, files: Files, device: str, touched: set[int]) -> Sample:
    question = {"socket": str(node.socket), "checkpoint": files.checkpoint, "device": device}
    answer = worker.load("move", lambda _: node.cpu_s(), **question)
    touched.add(answer["touched"])
    return Sample(answer["ready_s"], answer["cpu_s"])


def of_peer(loaders: Loaders, name: str, path: Path, device: str, touched: set[int]) -> Sample:
    answer = loaders.load(name, lambda _: warm([path]), path=str(path), device=device)
    touched.add(answer["touched"])
    return Sample(answer["ready_s"], answer["cpu_s"])


def main() -> None:
    options = parse_options(__doc__, rounds=5, quick_rounds=1)
    report = Report("segment → device at 90% of the rate of one copy of pinned memory, ahead of every loader of files")
    device, touched = options.device, set[int]()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fs-bench-", dir=disk_folder())))
        files = make_files(folder, llama.SHAPES[QUICK_SHAPE if options.quick else SHAPE])
        peers = stack.enter_context(peer_loaders(options.peer_python))
        worker = Loaders(stack.enter_context(module(OUR_WORKER)))
        node = stack.enter_context(ours.node(str(files.store), files.size_bytes))
        node.fill(files.checkpoint)
        size_bytes = files.size_bytes
        runners: dict[str, Callable[[], Sample]] = {
            PINNED: partial(pinned_copy, size_bytes, device),
            OURS: partial(of_ours, worker, node, files, device, touched),
        }
        runners |= {name: partial(of_peer, peers, name, files.source, device, touched) for name in PEERS}
        found = in_rounds(options, runners, f"segment → {device}")
        report.setup = {"device": device, "size_bytes": size_bytes, "peers": peers.about}
    if len(touched) != 1:
        raise RuntimeError("the loaders have different bytes on the device")
    record(report, f"segment → {device}", found)
    tell(report, found, size_bytes)
    report.save(options.json)


def tell(report: Report, found: dict[str, list[Sample]], size_bytes: int) -> None:
    title = f"{size_bytes / 1e9:.2f} GB of tensors on the device"
    rows = [[title, "s, median (quartiles)", "GB/s", "of pinned", "CPU s"]]
    ceiling = median([one.ready_s for one in found[PINNED]])
    for name, samples in found.items():
        if not samples:
            rows.append([name, "does not run here", "", "", ""])
            continue
        ready_s = median([one.ready_s for one in samples])
        said = spread([one.ready_s for one in samples])
        cpu = fine(median([one.cpu_s for one in samples]))
        rows.append([name, said, fine(size_bytes / 1e9 / ready_s), f"{ceiling / ready_s:.0%}", cpu])
    report.tell("Load", rows)
    share = ceiling / median([one.ready_s for one in found[OURS]])
    print(f"\nThe claim {'holds' if share >= AIM else 'does not hold'}: {share:.0%} of a copy of pinned memory.")


if __name__ == "__main__":
    main()
