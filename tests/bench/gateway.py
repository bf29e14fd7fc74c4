"""Claim: the gateway adds about a millisecond to a warm call.

One warm worker of `hello` is called through the gateway, with the system's key on every call, and straight at its own
endpoint (its secret read from the observed state), in turn, by the same client over kept connections; then again with
1 and 8 callers at once. In turn with both is a second system, which is open: what looking at the key costs. Ray Serve
follows in the same run with its own warm call: there, too, a request goes through a proxy to a worker's process.
BentoML and LitServe come after it, one worker each. They come after and not in turn, because they are never idle: what
they do between calls would be added to ours. The client runs on the same cores as everything else, so calls a second
are those of the whole machine, client included.

Run: python -m tests.bench.gateway [--json FILE] [--quick] [--peer-python PATH | --no-peer]
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.harness.samples import Options, Report, fine, median, parse_options, percentile, progress, spread
from tests.bench.harness.system import System, running
from tests.bench.harness.wire import Connection, parse_head, request
from tests.bench.peers.process import ray_serve, server

BODY = {"name": "you"}
CALLS_A_TURN = 50
CALLERS = (1, 8)
BURST_S, QUICK_BURST_S = 1.5, 0.5
WARM_UP_CALLS = 200


@dataclass(frozen=True, slots=True)
class Target:
    host: str
    port: int
    raw: bytes


async def _caller(target: Target, ends_s: float) -> list[float]:
    """One caller over one connection until the time is up; the length of each call in ms."""
    reader, writer = await asyncio.open_connection(target.host, target.port)
    took: list[float] = []
    try:
        while (began_s := time.monotonic()) < ends_s:
            writer.write(target.raw)
            status, headers = parse_head((await reader.readuntil(b"\r\n\r\n"))[:-4])
            if status != 200:
                raise RuntimeError(f"status {status}")
            if headers.get("transfer-encoding") == "chunked":
                await reader.readuntil(b"0\r\n\r\n")
            else:
                await reader.readexactly(int(headers["content-length"]))
            took.append((time.monotonic() - began_s) * 1e3)
    finally:
        writer.close()
    return took


async def burst(target: Target, callers: int, seconds: float) -> dict[str, float]:
    began_s = time.monotonic()
    lists = await asyncio.gather(*(_caller(target, began_s + seconds) for _ in range(callers)))
    elapsed_s = time.monotonic() - began_s
    took = [value for one in lists for value in one]
    return {"calls_per_s": len(took) / elapsed_s, "p50_ms": median(took), "p99_ms": percentile(took, 0.99)}


def main() -> None:
    options = parse_options(__doc__, rounds=40, quick_rounds=4)
    report = Report("the gateway adds about a millisecond to a warm call")
    with warm() as (system, with_key), warm(is_open=True) as (_, without_key):
        targets = {"gateway": with_key, "gateway_open": without_key, "worker": straight(system)}
        latencies, bursts = measure(targets, options)
    about: dict[str, Any] = {}
    for name, peer in peers(options):
        progress(name)
        with peer as (its_port, said):
            about |= said
            theirs = {name: Target("127.0.0.1", its_port, request("POST", "/hello", "localhost", BODY))}
            more = measure(theirs, options)
        latencies, bursts = latencies | more[0], bursts | more[1]
    burst_s = QUICK_BURST_S if options.quick else BURST_S
    report.setup = {"calls_a_turn": CALLS_A_TURN, "burst_s": burst_s, "peer": about or None}
    report.samples = {"latency_ms": latencies, "bursts": bursts}
    tell(report, latencies, bursts)
    report.save(options.json)


@contextlib.contextmanager
def warm(*, is_open: bool = False) -> Iterator[tuple[System, Target]]:
    """A system with one worker of `hello`, and how its callers call it."""
    with running("python", is_open=is_open) as system:
        flags = ("--keep-alive", "600", "--max", "1", "--concurrency", "16")
        path = system.deploy("examples/hello/handler.py", *flags)
        with system.connect() as connection:
            connection.post(path, BODY).expect()
        yield system, Target(system.host, system.port, request("POST", path, "localhost", BODY, system.shown))


def straight(system: System) -> Target:
    endpoint, token = system.ready_worker("hello")
    host, port = endpoint.rsplit(":", 1)
    return Target(host, int(port), request("POST", "/", "localhost", BODY, {"fs-worker-token": token}))


Peer = contextlib.AbstractContextManager[tuple[int, dict[str, Any]]]
"""Its port, and what it says of itself."""


def peers(options: Options) -> Iterator[tuple[str, Peer]]:
    """One after the other, each made when the one before has ended."""
    if options.peer_python:
        yield "ray_serve", _ray(options.peer_python)
        yield "bentoml", server(options.peer_python, "bentoml")
        yield "litserve", server(options.peer_python, "litserve")


@contextlib.contextmanager
def _ray(python: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with ray_serve(python) as peer:
        yield peer.port, peer.about


Latencies = dict[str, list[float]]
"""By target, in ms."""
Bursts = dict[str, dict[str, list[dict[str, float]]]]
"""By target and number of callers: one result a round."""


def measure(targets: dict[str, Target], options: Options) -> tuple[Latencies, Bursts]:
    with contextlib.ExitStack() as stack:
        connections = {name: stack.enter_context(Connection(t.host, t.port)) for name, t in targets.items()}
        latencies = one_by_one(connections, targets, options.rounds)
    return latencies, many(targets, 1, QUICK_BURST_S) if options.quick else many(targets, 5, BURST_S)


def one_by_one(connections: dict[str, Connection], targets: dict[str, Target], rounds: int) -> Latencies:
    for name, connection in connections.items():
        for _ in range(WARM_UP_CALLS):
            connection.send(targets[name].raw).expect()
    latencies: Latencies = {name: [] for name in targets}
    for number in range(rounds):
        if number % 10 == 0:
            progress(f"one at a time, turn {number + 1} of {rounds}")
        for name, connection in connections.items():
            latencies[name] += [connection.send(targets[name].raw).expect().total_ms for _ in range(CALLS_A_TURN)]
    return latencies


def many(targets: dict[str, Target], rounds: int, seconds: float) -> Bursts:
    found: Bursts = {name: {} for name in targets}
    for number in range(rounds):
        progress(f"several at a time, turn {number + 1} of {rounds}")
        for callers in CALLERS:
            for name, target in targets.items():
                result = asyncio.run(burst(target, callers, seconds))
                found[name].setdefault(str(callers), []).append(result)
    return found


def tell(report: Report, latencies: Latencies, bursts: Bursts) -> None:
    shown = {
        "worker": "straight",
        "gateway": "gateway",
        "gateway_open": "gateway, open",
        "ray_serve": "Ray Serve",
        "bentoml": "BentoML",
        "litserve": "LitServe",
    }
    names = [name for name in shown if name in latencies]
    base = median(latencies["worker"])
    rows = [["warm call of `hello`", *(shown[name] for name in names)]]
    rows.append(["median (quartiles), ms", *(spread(latencies[name]) for name in names)])
    rows.append(["99th percentile, ms", *(fine(percentile(latencies[name], 0.99)) for name in names)])
    rows.append(["added to straight, ms", *(fine(median(latencies[name]) - base) for name in names)])
    rows.append(["ratio to straight", *(fine(median(latencies[name]) / base) for name in names)])
    for callers in CALLERS:
        results = {name: bursts[name][str(callers)] for name in names}
        text = "1 caller" if callers == 1 else f"{callers} callers"
        rates = [median([one["calls_per_s"] for one in results[name]]) for name in names]
        rows.append([f"{text}: calls a second", *(fine(rate) for rate in rates)])
        rows.append([f"{text}: p99, ms", *(fine(median([one["p99_ms"] for one in results[name]])) for name in names)])
    report.tell("Gateway overhead", rows)
    added, without = (median(latencies[name]) - base for name in ("gateway", "gateway_open"))
    print(f"\nThe gateway adds {added:.2f} ms to a call of {base:.2f} ms; {without:.2f} ms where no key is shown.")


if __name__ == "__main__":
    main()
