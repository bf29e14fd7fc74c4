"""Claim: TLS between controller and node makes a warm call a sixth slower; loopback pays a microsecond.

A bed of two hosts without a limit on their links, one node with TLS, the other with FS_LINKS=plain, and a controller
for each, on one host. Warm calls of a function that answers at once, and of one that streams 8 MB, go to both in turn
over kept connections. For loopback, the time is measured that the gateway takes to decide how a worker is reached.

Run: python -m tests.bench.node_links [--json FILE] [--quick] --no-peer
"""

from __future__ import annotations

import time

from fleetstart.controller.gateway.node_links import NodeLinks
from fleetstart.controller.state.view import View
from fleetstart.runtime.contract.ids import FunctionName, NodeId, Version, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerStatus
from tests.bench.harness.samples import Report, fine, median, parse_options, percentile, progress, spread
from tests.bench.harness.wire import Connection, request
from tests.testbed import Testbed

HANDLER = """
from collections.abc import Iterator

from fleetstart.runtime import Scale, function


@function(name="{name}", concurrency=8, scale=Scale(min=1, max=1), region=["{name}"])
def answer(size: int) -> Iterator[str]:
    for _ in range(size):
        yield "x" * 65536
"""
CALLS_A_TURN = 20
LINKS = ("tls", "plain")
STREAM_PARTS = 128
DECISIONS = 100_000


def main() -> None:
    options = parse_options(__doc__, rounds=30, quick_rounds=3)
    report = Report("TLS between controller and node makes a warm call a sixth slower")
    bed = Testbed(nodes=2, mbit=0, env={"FS_PROFILES": "python"}, controllers=("control", "control"))
    for node, controller, links in zip(bed.nodes, bed.controllers, LINKS, strict=True):
        node.env |= {"FS_REGION": f"on-{links}", "FS_LINKS": links}
        controller.env["FS_LINKS"] = links
    calls: dict[str, list[float]] = {links: [] for links in LINKS}
    streams: dict[str, list[float]] = {links: [] for links in LINKS}
    try:
        bed.up()
        raw = {}
        connections = {}
        for links, url in zip(LINKS, bed.urls, strict=True):
            deploy(bed, links)
            connections[links] = Connection("127.0.0.1", int(url.rpartition(":")[2]))
            for size in (0, STREAM_PARTS):
                raw[links, size] = request("POST", f"/fn/on-{links}", "localhost", {"size": size})
            for _ in range(50):
                connections[links].send(raw[links, 0]).expect()
        for number in range(options.rounds):
            progress(f"turn {number + 1} of {options.rounds}")
            for links, connection in connections.items():
                calls[links] += [connection.send(raw[links, 0]).expect().total_ms for _ in range(CALLS_A_TURN)]
                streams[links].append(connection.send(raw[links, STREAM_PARTS]).expect().total_ms)
        bed.down()
    finally:
        bed.close()
    loopback_ns = decision_ns()
    report.setup = {"calls_a_turn": CALLS_A_TURN, "stream_bytes": STREAM_PARTS * 65536, "decisions": DECISIONS}
    report.samples = {"call_ms": calls, "stream_ms": streams, "loopback_decision_ns": loopback_ns}
    rows = [["link to the worker", "TLS", "plain", "ratio"]]
    for what, found in (("warm call", calls), ("stream of 8 MB", streams)):
        ratio = median(found["tls"]) / median(found["plain"])
        rows.append([f"{what}, median (quartiles), ms", *(spread(found[links]) for links in LINKS), fine(ratio)])
        nines = [percentile(found[links], 0.99) for links in LINKS]
        rows.append([f"{what}, p99, ms", *(fine(value) for value in nines), fine(nines[0] / nines[1])])
    report.tell("Links to nodes", rows)
    print(f"\nTLS adds {median(calls['tls']) - median(calls['plain']):.2f} ms to a call; on loopback, to decide that")
    print(f"there is none takes {loopback_ns:.0f} ns.")
    report.save(options.json)


def deploy(bed: Testbed, links: str) -> None:
    folder = bed.folder / f"on-{links}"
    folder.mkdir()
    (folder / "handler.py").write_text(HANDLER.format(name=f"on-{links}"))
    bed.fs("deploy", str(folder / "handler.py"), "--no-probe")


def decision_ns() -> float:
    """Time of one decision about a worker on loopback, beyond that of building its URL."""
    links = NodeLinks(View())
    status = WorkerStatus(
        worker=WorkerId("w"), node=NodeId("n"), function=FunctionName("f"), version=Version(1), state="ready",
        endpoint="127.0.0.1:5000",
    )  # fmt: skip
    began_ns = time.perf_counter_ns()
    for _ in range(DECISIONS):
        links.target(status, "/x")
    decided_ns = time.perf_counter_ns() - began_ns
    from yarl import URL

    began_ns = time.perf_counter_ns()
    for _ in range(DECISIONS):
        URL(f"http://{status.endpoint}/x", encoded=True)
    return (decided_ns - (time.perf_counter_ns() - began_ns)) / DECISIONS


if __name__ == "__main__":
    main()
