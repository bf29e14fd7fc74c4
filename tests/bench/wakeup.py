"""Claim: a function without weights wakes from zero in less than 50 ms, because its process was forked before.

From the request sent until the response complete, with no worker at the start: from a pooled worker (the default),
from a fresh one (FS_POOL_SIZE=0: fork, namespaces and limits are in the path), and Ray Serve with min_replicas=0.
Two systems and the peer run side by side and take turns, so that what disturbs one disturbs all; each is asleep
when its turn comes. Before every call the caller waits until the function has no worker; connections are kept alive.

Run: python -m tests.bench.wakeup [--json FILE] [--quick] [--peer-python PATH | --no-peer]
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from tests.bench.harness.samples import Report, fine, median, parse_options, percentile, progress, spread
from tests.bench.harness.system import System, running
from tests.bench.harness.timelines import phase_rows, phases_ms
from tests.bench.harness.wire import Connection
from tests.bench.peers.process import RayServe, ray_serve

KEEP_ALIVE_S = "0.2"
CALLS_A_ROUND, QUICK_CALLS = 4, 1
"""Of ours, for one of the peer's: its way down to zero takes seconds."""
AIM_MS = 50.0
BODY = {"name": "you"}


@dataclass(slots=True)
class Ours:
    """One system, its connection, and what was measured."""

    system: System
    path: str
    connection: Connection
    totals_ms: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)
    pooled: list[bool] = field(default_factory=list)
    isolation: str = ""

    def wake(self, *, keep: bool = True) -> None:
        self.system.wait_asleep("hello")
        answer = self.connection.post(self.path, BODY).expect()
        if answer.headers["fs-start"] == "hot":
            raise RuntimeError("the worker was there already: nothing was woken")
        if not keep:
            return
        trace = self.system.trace(answer.headers["x-request-id"])
        self.totals_ms.append(answer.total_ms)
        self.phases.append(phases_ms(trace, sent_ns=answer.sent_ns, ended_ns=answer.ended_ns))
        self.pooled.append(trace["pooled"])
        self.isolation = trace["isolation"]

    def warm_ms(self, calls: int) -> list[float]:
        """Times of the same calls with a warm worker: what waking adds is the difference."""
        return [self.connection.post(self.path, BODY).expect().total_ms for _ in range(calls)]


def open_ours(stack: contextlib.ExitStack, pool_size: str) -> Ours:
    system = stack.enter_context(running("python", FS_POOL_SIZE=pool_size))
    path = system.deploy("examples/hello/handler.py", "--keep-alive", KEEP_ALIVE_S)
    return Ours(system, path, stack.enter_context(system.connect()))


def wake_peer(peer: RayServe) -> float:
    peer.wait_asleep("hello")
    with peer.connect() as connection:
        return connection.post("/hello", BODY).expect().total_ms


def main() -> None:
    options = parse_options(__doc__, rounds=8, quick_rounds=2)
    report = Report("a function without weights wakes from zero in less than 50 ms")
    with contextlib.ExitStack() as stack:
        ours = {"pooled": open_ours(stack, "1"), "fresh": open_ours(stack, "0")}
        peer = stack.enter_context(ray_serve(options.peer_python)) if options.peer_python else None
        for one in ours.values():
            one.wake(keep=False)  # the first one fetches and unpacks the bundle
        theirs: list[float] = []
        for number in range(options.rounds):
            progress(f"round {number + 1} of {options.rounds}")
            if peer is not None:
                theirs.append(wake_peer(peer))
                peer.wait_asleep("hello")
            for _ in range(QUICK_CALLS if options.quick else CALLS_A_ROUND):
                for one in ours.values():
                    one.wake()
        warm = {name: one.warm_ms(50) for name, one in ours.items()}
    report.setup = {
        "keep_alive_s": float(KEEP_ALIVE_S),
        "isolation": ours["pooled"].isolation,
        "pooled": {name: sum(one.pooled) for name, one in ours.items()},
        "calls": {name: len(one.totals_ms) for name, one in ours.items()},
        "peer": peer.about if peer else None,
    }
    report.samples = {
        **{name: {"total_ms": one.totals_ms, "phases_ms": one.phases} for name, one in ours.items()},
        "warm_ms": warm,
        "ray_serve_ms": theirs,
    }
    tell(report, ours, theirs, warm)
    report.save(options.json)


def tell(report: Report, ours: dict[str, Ours], theirs: list[float], warm: dict[str, list[float]]) -> None:
    base = median(ours["pooled"].totals_ms)
    rows = [["wake-up of `hello`, ms", "pooled", "fresh", "Ray Serve"]]
    peer = [theirs] if theirs else []
    all_totals = [*(one.totals_ms for one in ours.values()), *peer]
    rows.append(["median (quartiles)", *(spread(totals) for totals in all_totals)])
    rows.append(["slowest of", *(f"{fine(max(totals))} of {len(totals)}" for totals in all_totals)])
    rows.append(["90th percentile", *(fine(percentile(totals, 0.9)) for totals in all_totals)])
    rows.append(["ratio to pooled", *(fine(median(totals) / base) for totals in all_totals)])
    rows += phase_rows({name: one.phases for name, one in ours.items()})
    rows.append(["the same call, hot", *(fine(median(values)) for values in warm.values())])
    width = len(rows[0])
    report.tell("Wake-up from zero", [row + ["–"] * (width - len(row)) for row in rows])
    verdict = "holds" if base < AIM_MS else "does not hold"
    pooled = sum(ours["pooled"].pooled)
    print(f"\nThe claim {verdict}: {base:.1f} ms with {pooled} of {len(ours['pooled'].pooled)} from a pooled worker.")


if __name__ == "__main__":
    main()
