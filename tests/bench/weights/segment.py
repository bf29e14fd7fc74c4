"""Benchmark of segment → usable tensors in a new process: time, memory, and proof that no view can dangle.

Each process is forked from one that has imported torch and `runtime.weights` and has run nothing of them; a pooled
worker has then bound a few tensors for nobody, as ours do while they wait for work. It gets the descriptors, then the
clock starts: attach, read the manifest, a view of every tensor. Beside it, from the page
cache, what comes nearest elsewhere: safetensors' mmap of the file. Memory is what /proc says of the processes (PSS
divides each shared page among those who map it) when a first worker and then a second have touched every tensor.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.bench.harness import llama
from tests.bench.harness.caches import warm
from tests.bench.harness.samples import Options, Report, fine, median, progress, spread
from tests.bench.weights import ours
from tests.bench.weights.files import Files, make_files
from tests.bench.weights.loaders import OUR_WORKER, Loaders, module

AIM_MS = 2.0
OURS = "fleetstart, pooled worker"
FRESH = "fleetstart, just forked"
MIB = 1 << 20


def run(report: Report, options: Options, files: Files, worker: Loaders, peers: Loaders) -> None:
    """The large checkpoint is that of the other parts; the small one is made here."""
    sizes = {"large": files}
    if not options.quick:
        sizes["small"] = make_files(files.folder / "small", llama.SHAPES["64M"])
    rows = [["segment → 201 tensors", "GB", "attach and bind, ms", "and touch every page, ms"]]
    found: dict[str, dict[str, list[float]]] = {}
    with contextlib.ExitStack() as stack:
        nodes = {name: stack.enter_context(ours.node(str(one.store), one.size_bytes)) for name, one in sizes.items()}
        for name, node in nodes.items():
            node.fill(sizes[name].checkpoint)
        for number in range(options.quick, options.rounds + 1):
            for name, one in sizes.items():
                for side, sample in (
                    (OURS, _bind(worker, nodes[name], one, rehearsed=True)),
                    (FRESH, _bind(worker, nodes[name], one, rehearsed=False)),
                    ("safetensors, page cache warm", _map(peers, one.source)),
                ):
                    if number:  # the first round is not kept
                        kept = found.setdefault(f"{side}, {name}", {column: [] for column in sample})
                        for column, value in sample.items():
                            kept[column].append(value)
        memory = second_worker(nodes["large"], worker, files)
    for name, one in sizes.items():
        for row in (key for key in found if key.endswith(name)):
            rows.append([row, fine(one.size_bytes / 1e9), *map(spread, found[row].values())])
    report.samples["segment"] = {"ms": found, "memory": memory}
    report.tell("Existing segment into a new process", rows)
    slowest = max(median(found[f"{OURS}, {name}"]["bind_ms"]) for name in sizes)
    print(f"\nThe claim {'holds' if slowest < AIM_MS else 'does not hold'}: {slowest:.2f} ms.")
    tell_memory(report, files, memory)


def _bind(worker: Loaders, node: ours.Node, files: Files, *, rehearsed: bool) -> dict[str, float]:
    answer = worker.do("bind", socket=str(node.socket), checkpoint=files.checkpoint, rehearsed=rehearsed)
    return {"bind_ms": answer["bind_ms"], "touch_ms": answer["bind_ms"] + answer["touch_ms"]}


def _map(peers: Loaders, path: Path) -> dict[str, float]:
    answer = peers.load("safetensors", lambda _: warm([path]), path=str(path))
    return {"bind_ms": answer["returned_s"] * 1e3, "touch_ms": answer["ready_s"] * 1e3}


def second_worker(node: ours.Node, first: Loaders, files: Files) -> dict[str, float]:
    """Mebibytes, summed over the node and its workers; and whether views were good when all else was gone."""
    progress("memory of a second worker")
    question = {"socket": str(node.socket), "checkpoint": files.checkpoint}
    sums: list[dict[str, float]] = []
    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor() as team:
            second, bare = team.map(lambda _: Loaders(stack.enter_context(module(OUR_WORKER))), range(2))
        pids: list[int] = [node.pid]

        def third_is_bare(pid: int) -> None:
            sums.append(memory_of([*pids, pid]))

        def second_is_there(pid: int) -> None:
            pids.append(pid)
            sums.append(memory_of(pids))
            bare.load("idle", third_is_bare)

        touched: list[int] = []

        def first_is_there(pid: int) -> None:
            pids.append(pid)
            sums.append(memory_of(pids))
            touched.append(second.load("survive", second_is_there, **question)["touched"])

        touched.append(first.load("survive", first_is_there, **question)["touched"])
        touched.append(first.do("bind", **question, rehearsed=False)["touched"])
    one, two, three = sums
    return {
        "node and one worker": one["all"],
        "of it shared memory": one["weights"],
        "a second worker adds": two["all"] - one["all"],
        "of it shared memory, added": two["weights"] - one["weights"],
        "a worker without weights adds": three["all"] - two["all"],
        "views_good": float(len(set(touched)) == 1),
    }


def memory_of(pids: list[int]) -> dict[str, float]:
    """PSS leaves huge pages of hugetlbfs out: those are counted once, as shared by all who map them."""
    whole = {"all": 0.0, "weights": 0.0}
    hugetlb = 0.0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        kib = {name: float(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        whole["all"] += kib["Pss"] / 1024
        whole["weights"] += kib.get("Pss_Shmem", 0.0) / 1024
        hugetlb = max(hugetlb, (kib["Shared_Hugetlb"] + kib["Private_Hugetlb"]) / 1024)
    return {name: value + hugetlb for name, value in whole.items()}


def tell_memory(report: Report, files: Files, memory: dict[str, float]) -> None:
    rows = [["memory by PSS, MiB", "all", "shared memory"]]
    rows.append(["node and one worker", fine(memory["node and one worker"]), fine(memory["of it shared memory"])])
    rows.append(
        ["a second worker adds", fine(memory["a second worker adds"]), fine(memory["of it shared memory, added"])]
    )
    rows.append(["a worker without weights adds", fine(memory["a worker without weights adds"]), ""])
    report.tell(f"Memory for {files.size_bytes / MIB:,.0f} MiB of weights, every page touched", rows)
    good = "hold the right bytes" if memory["views_good"] else "do NOT hold the right bytes"
    print(f"\nTensors {good} after everything else of their segment was let go.")
