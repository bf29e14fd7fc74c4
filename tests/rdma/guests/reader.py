"""The reader's guest: reads from the other one in every way that is tested, and writes down what it found.

Each finding is a function; the results go to `results.json` in the bed's folder, errors with their trace.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from fleetstart.native import NativeError, xxh3
from fleetstart.native._rdma import RdmaReader
from fleetstart.prefetcher.network.rdma_devices import rdma_devices
from tests.rdma.bed import DEBIAN_PYTHON
from tests.rdma.guests import region as shared
from tests.rdma.guests import whole_nodes
from tests.rdma.guests.holder import PEER, pyverbs_environment
from tests.rdma.guests.hostile import HOSTILE
from tests.rdma.guests.loss import set_loss
from tests.rdma.guests.node import CALM_S, LIMIT_S, PORTS, RANGES, SILENCE_S, Holder, Node

ATTEMPTS = 5
"""A guest that stands still for longer than the silence loses its connection before the test does anything to it."""
LOSS_PERCENT = 1.0
"""Of the packets in each direction: a link that is broken. About twenty of a region's."""
NUMBERS = count()
"""Of requests that are sent until a connection is lost."""


def read_all(reader: RdmaReader) -> dict[str, Any]:
    """Asks for every chunk at once."""
    began_s = time.monotonic()
    for one in RANGES:
        reader.submit(one.number, one.offset, one.size_bytes, LIMIT_S)
    done = []
    while completions := reader.poll(LIMIT_S):
        done.extend(completions)
    right = [one.request for one in done if one.status == "ok" and one.checksum == xxh3(shared.content(one.request))]
    return {
        "statuses": sorted({one.status for one in done}),
        "requests": sorted(one.request for one in done),
        "right_checksums": len(right),
        "mb_per_s": round(shared.REGION_BYTES / (time.monotonic() - began_s) / 1e6, 1),
        "error": reader.error,
    }


def ours_reads_pyverbs(node: Node) -> dict[str, Any]:
    node.clear()
    port = next(PORTS)
    node.holder("pyverbs", arguments=["hold", str(port), str(shared.REGION_BYTES), str(shared.CHUNK_BYTES)])
    reader = node.reader(port)
    found = read_all(reader)
    reader.cancel()
    del reader
    return {**found, "right": node.right(), "peer": node.holder("pyverbs_outcome")}


def pyverbs_reads_ours(node: Node) -> dict[str, Any]:
    """The second half of the chunks becomes ready while it reads."""
    port = next(PORTS)
    pid = node.holder.hold(port, ready=shared.CHUNKS // 2, brings=True)
    command = [
        str(DEBIAN_PYTHON),
        PEER,
        "read",
        shared.HOLDER,
        str(port),
        str(shared.REGION_BYTES),
        str(shared.CHUNK_BYTES),
    ]
    peer = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=pyverbs_environment(), timeout=LIMIT_S)
    return {"peer": json.loads(peer.stdout), "holder": node.holder("outcome", pid=pid)}


def ours_reads_ours(node: Node) -> dict[str, Any]:
    """Chunks come one by one at the holder; a second reader may have only some, and is refused the others."""
    node.clear()
    port = next(PORTS)
    pid = node.holder.hold(port, ready=0, brings=True)
    reader = node.reader(port)
    found = {**read_all(reader), "right": node.right()}
    del reader
    found["holder"] = node.holder("outcome", pid=pid)
    port = next(PORTS)
    pid = node.holder.hold(port, ready=2, allowed=4)
    reader = node.reader(port)
    for chunk in (0, 3, 4):
        reader.submit(chunk, RANGES[chunk].offset, RANGES[chunk].size_bytes, 0.0)
    statuses: dict[int, str] = {}
    while completions := reader.poll(LIMIT_S):
        statuses |= {one.request: one.status for one in completions}
    reader.cancel()
    del reader
    node.holder("outcome", pid=pid)
    return {**found, "some": [statuses[chunk] for chunk in (0, 3, 4)]}


def keep_reading(reader: RdmaReader, seconds: float) -> str:
    """Reads the region again and again, until the connection is lost or time is over. Status of the last answer."""
    until_s, last, outstanding, lost = time.monotonic() + seconds, "none", 0, False
    while time.monotonic() < until_s:
        try:
            while outstanding < 16:
                one = RANGES[(number := next(NUMBERS)) % shared.CHUNKS]
                reader.submit(number, one.offset, one.size_bytes, LIMIT_S)
                outstanding += 1
        except NativeError:  # the connection is lost; what was outstanding has failed, or else this request has
            last = last if lost or outstanding else "failed"
            outstanding, lost = 0, True
        completions = reader.poll(0.05)
        outstanding = max(0, outstanding - len(completions))
        last = completions[-1].status if completions else last
        if reader.error is not None and not completions:
            break
    return last


def _loses_holder(node: Node, name: str, silence_s: float) -> dict[str, Any]:
    for _ in range(ATTEMPTS):
        pid = node.holder.hold(port := next(PORTS), silence_s=CALM_S)
        reader = node.reader(port, silence_s)
        before = keep_reading(reader, 0.5)
        if reader.error is None:
            break
        node.holder("outcome", pid=pid)
    began_s = time.monotonic()
    node.holder("signal", pid=pid, name=name)
    after = keep_reading(reader, LIMIT_S)
    noticed_s = time.monotonic() - began_s
    why = reader.error
    del reader
    node.holder("signal", pid=pid, name="SIGKILL")
    node.holder("outcome", pid=pid)
    return {"before": before, "after": after, "noticed_s": noticed_s, "why": why}


def holder_is_killed(node: Node) -> dict[str, Any]:
    return _loses_holder(node, "SIGKILL", CALM_S)


def holder_is_silent(node: Node) -> dict[str, Any]:
    return _loses_holder(node, "SIGSTOP", SILENCE_S)


def _start_reader(node: Node, port: int) -> tuple[int, bytes]:
    """A process that reads until it is lost; its number, and the status of its first read."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            reader = Node(node.holder).reader(port)
            reader.submit(next(NUMBERS), 0, shared.CHUNK_BYTES, LIMIT_S)
            os.write(writes, reader.poll(LIMIT_S)[0].status.encode())
            keep_reading(reader, LIMIT_S)
        finally:
            os._exit(1)
    os.close(writes)
    with os.fdopen(reads, "rb", buffering=0) as first:
        return child, first.read(16)


def _loses_reader(node: Node, name: signal.Signals, silence_s: float) -> dict[str, Any]:
    for _ in range(ATTEMPTS):
        pid = node.holder.hold(port := next(PORTS), silence_s=silence_s)
        child, first = _start_reader(node, port)
        if first == b"ok":
            break
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        node.holder("outcome", pid=pid)
    began_s = time.monotonic()
    os.kill(child, name)
    outcome = node.holder("outcome", pid=pid)
    noticed_s = time.monotonic() - began_s
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return {"first": first.decode(), "noticed_s": noticed_s, "holder": outcome}


def reader_is_killed(node: Node) -> dict[str, Any]:
    return _loses_reader(node, signal.SIGKILL, CALM_S)


def reader_is_silent(node: Node) -> dict[str, Any]:
    return _loses_reader(node, signal.SIGSTOP, SILENCE_S)


def goes_on_by_tcp(node: Node) -> dict[str, Any]:
    return whole_nodes.fetch(Path(sys.argv[1]), node.holder)


def loses_packets(node: Node) -> dict[str, Any]:
    """Both guests lose packets while it reads."""
    node.clear()
    pid = node.holder.hold(port := next(PORTS))
    reader = node.reader(port)
    set_loss(LOSS_PERCENT)
    node.holder("lose", percent=LOSS_PERCENT)
    try:
        found = read_all(reader)
    finally:
        lost = set_loss(0) + node.holder("lose", percent=0)["lost"]
    reader.cancel()
    del reader
    return {**found, "right": node.right(), "holder": node.holder("outcome", pid=pid), "lost": lost}


FINDINGS: tuple[Callable[[Node], dict[str, Any]], ...] = (
    ours_reads_pyverbs,
    pyverbs_reads_ours,
    ours_reads_ours,
    holder_is_killed,
    holder_is_silent,
    reader_is_killed,
    reader_is_silent,
    goes_on_by_tcp,
    loses_packets,
    *HOSTILE,
)


def main() -> None:
    folder = Path(sys.argv[1])
    results: dict[str, Any] = {"devices": [[one.name, one.state, one.link, one.problem] for one in rdma_devices()]}
    node = Node(Holder())
    for finding in FINDINGS:
        began_s = time.monotonic()
        try:
            results[finding.__name__] = finding(node)
        except Exception:
            results[finding.__name__] = {"failed": traceback.format_exc()}
        results[finding.__name__]["took_s"] = round(time.monotonic() - began_s, 2)
        print(finding.__name__, results[finding.__name__], flush=True)
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
