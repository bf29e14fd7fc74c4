"""Claim: a pull moves 0.9 times the bytes of plain sockets in a second of processor time, and verifies them.

1 GiB from the memory of one process into that of another over loopback, one connection, memory touched before. In
shuffled rounds: ours (4 MiB chunks, hashed on the way), with a copy into the socket, as on one machine, and without, as
between two; `os.sendfile` to `recv_into`; the same with each chunk hashed after it came; ours and plain sockets inside
TLS 1.3, as nodes with certificates have it; and, in a Python of their own, Mooncake and NIXL over TCP, which verify
nothing. Processor time is that of both ends. Aim: both ways at least 0.9 × the bytes that sendfile to recv_into moves
in a second of processor time, ahead of Mooncake and NIXL in that and in bytes a second.

Run: python -m tests.bench.peer_pull [--mib N] [--json FILE] [--quick] [--rounds N] [--peer-python PATH | --no-peer]
"""

from __future__ import annotations

import argparse
import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fleetstart.runtime.contract.weights.manifest import CHUNK_BYTES
from tests.bench.harness.samples import Options, Report, fine, median, parse_options, progress, spread
from tests.bench.peer_pull.ends import OURS, OURS_ACROSS
from tests.bench.peers.process import peer
from tests.bench.weights.loaders import Sample, module

SOCKETS, HASHED = "sockets", "sockets, hashed"
OURS_TLS, SOCKETS_TLS = "fleetstart, TLS", "send → recv_into, TLS"
TITLES = {SOCKETS: "sendfile → recv_into", HASHED: "sendfile → recv_into, hashed"}
ENGINES = {"mooncake": "Mooncake, TCP", "nixl": "NIXL, TCP"}
BOTH = (OURS, OURS_ACROSS)
AIM = 0.9
MIB = 1 << 20
ENGINES_SCRIPT = Path(__file__).with_name("engines.py")
Pull = Callable[[], Sample]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=int, help="bytes of one pull; default 1024, 64 with --quick")


@contextlib.contextmanager
def sockets(kind: str, size_bytes: int, report: Report) -> Iterator[Pull]:
    name = f"tests.bench.peer_pull.{'encrypted' if 'TLS' in kind else 'ends'}"
    with (
        module(name, "serve", kind, str(size_bytes)) as serving,
        module(name, "pull", kind, str(size_bytes)) as pulling,
    ):
        report.setup["pages"] = serving.about["pages"]
        checked: list[bool] = []

        def run() -> Sample:
            serving.tell(go=True)
            got = pulling.ask(port=serving.about["port"], check=not checked, identity=serving.about.get("identity", {}))
            expected = serving.about["checksums"]
            if any(found and found != expected for found in (got["verified"], got["checksums"])):
                raise RuntimeError(f"{kind} has other bytes than its peer")
            checked.append(True)
            return Sample(got["ready_s"], got["cpu_s"] + serving.hear()["cpu_s"])

        yield run


@contextlib.contextmanager
def engine(python: Path, which: str, size_bytes: int, report: Report) -> Iterator[Pull | None]:
    """None if it is not installed or does not start here; the output says why."""
    options = ("--which", which, "--size-bytes", str(size_bytes), "--role")
    with (
        peer(python, ENGINES_SCRIPT, *options, "serve") as serving,
        peer(python, ENGINES_SCRIPT, *options, "pull") as pulling,
    ):
        about: dict[str, Any] = serving.about
        report.setup[which] = about.get("error") or pulling.about.get("error") or about["version"]
        if "error" in about or "error" in pulling.about:
            progress(f"without {ENGINES[which]}: {report.setup[which]}")
            yield None
            return

        def run() -> Sample:
            before = serving.ask(pull=None)["cpu_s"]
            got = pulling.ask(pull=about)
            if not got["right"]:
                raise RuntimeError(f"{ENGINES[which]} has other bytes than its peer")
            return Sample(got["ready_s"], got["cpu_s"] + serving.ask(pull=None)["cpu_s"] - before)

        yield run


def measure(options: Options, pulls: dict[str, Pull]) -> dict[str, list[Sample]]:
    order = random.Random(7)
    found: dict[str, list[Sample]] = {name: [] for name in pulls}
    for pull in pulls.values():
        pull()  # buffers of sockets and connections of engines grow
    for number in range(options.rounds):
        progress(f"round {number + 1} of {options.rounds}")
        for name in order.sample(list(pulls), len(pulls)):
            found[name].append(pulls[name]())
    return found


def tell(report: Report, found: dict[str, list[Sample]], size_bytes: int) -> None:
    gigabytes = size_bytes / 1e9
    rows = [["peer → memory", "GB/s", "CPU s/GB", "GB a CPU second, of plain sockets'"]]
    shares: dict[str, float] = {}
    for name, samples in found.items():
        pairs = zip(found[TITLES[SOCKETS]], samples, strict=True)
        shares[name] = median([plain.cpu_s / one.cpu_s for plain, one in pairs])
        rows.append(
            [
                name,
                spread([gigabytes / one.ready_s for one in samples]),
                spread([one.cpu_s / gigabytes for one in samples]),
                f"{fine(shares[name])}×",
            ]
        )
    report.tell("Pull from a peer over TCP, one machine", rows)
    rates = {name: median([gigabytes / one.ready_s for one in samples]) for name, samples in found.items()}
    others = [name for name in ENGINES.values() if name in found]
    ahead = all(shares[ours] > shares[name] and rates[ours] > rates[name] for ours in BOTH for name in others)
    holds = "holds" if min(shares[ours] for ours in BOTH) >= AIM and ahead else "does not hold"
    print(f"\nThe claim {holds}: {fine(shares[OURS])} × what sendfile → recv_into moves in a CPU second,")
    print(f"{fine(shares[OURS_ACROSS])} × as between machines;")
    print(f"{'' if ahead else 'not '}ahead of {' and '.join(others) or 'others, as there are none here'}.")


def main() -> None:
    options = parse_options(__doc__, rounds=9, quick_rounds=2, more=add_options)
    mib = options.extra["mib"] or (16 if options.quick else 1024)
    size_bytes = -(-mib * MIB // CHUNK_BYTES) * CHUNK_BYTES
    report = Report(f"a pull over TCP moves {AIM} × the bytes of plain sockets for a CPU second, and verifies them")
    report.setup["size_bytes"] = size_bytes
    with contextlib.ExitStack() as stack:
        pulls: dict[str, Pull] = {name: stack.enter_context(sockets(name, size_bytes, report)) for name in BOTH}
        for kind, title in TITLES.items():
            pulls[title] = stack.enter_context(sockets(kind, size_bytes, report))
        for kind in (OURS_TLS, SOCKETS_TLS):
            pulls[kind] = stack.enter_context(sockets(kind, size_bytes, report))
        if options.peer_python is not None:
            for which, title in ENGINES.items():
                if (pull := stack.enter_context(engine(options.peer_python, which, size_bytes, report))) is not None:
                    pulls[title] = pull
        found = measure(options, pulls)
    report.samples = {name: [one._asdict() for one in samples] for name, samples in found.items()}
    tell(report, found, size_bytes)
    report.save(options.json)


if __name__ == "__main__":
    main()
