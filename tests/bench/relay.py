"""Claim: a hop through the object store takes less than three times what its two requests take.

Words of hidden states, one each 100 ms as in a pipeline that decodes, from one host of a test bed to another: over a
connection, and through the store by which stages talk whose nodes cannot reach each other (HydraServe, section 8.5).
Beside it, what one request for an object of that size takes from a host: a hop is a PUT, a GET, and half of the time
between two looks for the next object.

Run: python -m tests.bench.relay [--json FILE] [--quick] [--rounds N] --no-peer
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.bench.harness.samples import Report, fine, median, parse_options, percentile, progress, spread
from tests.bench.relay_end import LINK
from tests.testbed import Testbed, why_not
from tests.testbed.bed import BUCKET

MBIT = 200.0
SIZES = {"4 rows of 576": 4 * 576 * 4, "32 rows of 4,096": 32 * 4096 * 4}
"""A small batch of the chat example, and a full one of a model of 7 B parameters; numbers of four bytes."""
PAUSE_S = 0.1
WORDS, QUICK_WORDS = 100, 20
END_S = 60
REQUESTS = """
import json, sys, time
from fleetstart.prefetcher.stage_links.relay_store import S3Objects
objects, data, took_ms = S3Objects(sys.argv[1], ""), bytes(int(sys.argv[2])), {"put": [], "get": []}
for number in range(int(sys.argv[3])):
    for verb, ask in (("put", lambda key: objects.put(key, data)), ("get", lambda key: objects.get(key, len(data)))):
        began = time.monotonic_ns()
        ask(f"relay/p-requests/0-1/{number}")
        took_ms[verb].append((time.monotonic_ns() - began) / 1e6)
    objects.delete(f"relay/p-requests/0-1/{number}")
print(json.dumps(took_ms))
"""


def main() -> None:
    options = parse_options(__doc__, rounds=3, quick_rounds=1)
    if reason := why_not():
        sys.exit(f"no test bed here: {reason}")
    report = Report("a hop through the object store takes less than three times what its two requests take")
    words = QUICK_WORDS if options.quick else WORDS
    report.setup = {"mbit": MBIT, "words": words, "pause_s": PAUSE_S, "store": "localbucket on a host of its own"}
    rows = [["one way, ms", "connection", "store", "99th of the store's", "PUT", "GET"]]
    with Testbed(nodes=2, mbit=MBIT, env={"FS_PROFILES": "python"}) as bed:
        for title, size_bytes in SIZES.items():
            found: dict[str, list[float]] = {"direct": [], "relay": [], "put": [], "get": []}
            for number in range(options.rounds):
                progress(f"{title}, round {number + 1} of {options.rounds}")
                for way in ("direct", "relay"):
                    found[way] += hop(bed, way, size_bytes, words)
                for verb, samples in requests(bed, size_bytes, words).items():
                    found[verb] += samples
            report.samples[title] = found
            row = [title, spread(found["direct"]), spread(found["relay"]), fine(percentile(found["relay"], 0.99))]
            rows.append([*row, fine(median(found["put"])), fine(median(found["get"]))])
    report.tell("A hop between two stages", rows)
    report.save(options.json)


def hop(bed: Testbed, way: str, size_bytes: int, words: int) -> list[float]:
    """Milliseconds from the sender's write to the receiver's last byte, of each word but the first."""
    address = bed.network.addresses["node-1"]
    rest = [way, address, str(size_bytes), str(words), str(PAUSE_S)]
    with start(bed, "node-1", "receive", rest) as receiver, start(bed, "node-0", "send", rest) as sender:
        said, _ = receiver.communicate(timeout=END_S)
        sender.wait(END_S)
    if receiver.returncode != 0 or sender.returncode != 0:
        sys.exit(f"an end of {LINK.folder} failed: {receiver.returncode}, {sender.returncode}")
    ages_ms: list[float] = json.loads(said)
    return ages_ms[1:]


def start(bed: Testbed, host: str, end: str, rest: list[str]) -> subprocess.Popen[str]:
    """Returns once a receiver listens."""
    argv = bed.network.entered(host, [sys.executable, "-m", "tests.bench.relay_end", end, *rest])
    process = subprocess.Popen(argv, env=bed.env, stdout=subprocess.PIPE, text=True)
    if end == "receive":
        assert process.stdout is not None
        process.stdout.readline()
    return process


def requests(bed: Testbed, size_bytes: int, count: int) -> dict[str, list[float]]:
    done = bed.run(0, sys.executable, "-c", REQUESTS, BUCKET, str(size_bytes), str(count))
    if done.returncode != 0:
        sys.exit(done.stderr)
    took_ms: dict[str, Any] = json.loads(done.stdout)
    return took_ms


if __name__ == "__main__":
    main()
