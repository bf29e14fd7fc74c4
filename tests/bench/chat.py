"""Claim: with its weights in the node's memory, a language model that sleeps answers almost as soon as a hot one.

Time to first token of `chat` (SmolLM2-135M, fp32 arithmetic), one fixed prompt, greedy, streamed, by where the
weights are when the call is sent:

- cold: in the store only. The node's daemon is restarted, so its memory is empty, and the store's files are taken
  out of the page cache, so that they come from the disk.
- warm: in the node's segment; no worker runs. - hot: a worker runs.

Beside it Ray Serve, min_replicas=0, whose replica loads the same safetensors file with transformers in fp32 and
generates one token: with the file out of the page cache, in it, and with the replica there. Both sides may use all
cores. The states take turns within each round.

Run: python -m tests.bench.chat [--json FILE] [--quick] [--peer-python PATH | --no-peer]
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from tests.bench.harness.samples import ROOT, Report, fine, median, parse_options, progress, spread
from tests.bench.harness.system import System, evict, running
from tests.bench.harness.timelines import phase_rows, phases_ms
from tests.bench.harness.wire import Answer, Connection
from tests.bench.peers.process import RayServe, ray_serve

MODEL = ROOT / "examples/chat/weights"
MESSAGES = [{"role": "user", "content": "Why is the sky blue? Answer in one sentence."}]
KEEP_ALIVE_S = "1"
AIM_MS = 100.0
STATES = ("cold", "warm", "hot")


@dataclass(slots=True)
class Ours:
    system: System
    path: str
    connection: Connection
    ttft_ms: dict[str, list[float]] = field(default_factory=lambda: {state: [] for state in STATES})
    phases: dict[str, list[dict[str, float]]] = field(default_factory=lambda: {state: [] for state in STATES})
    pooled: list[bool] = field(default_factory=list)

    def call(self) -> Answer:
        value = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0, "stream": True}
        answer = self.connection.post(f"{self.path}/v1/chat/completions", value).expect()
        if not answer.token_ns:
            raise RuntimeError(f"no text came: {answer.body[:500]!r}")
        return answer

    def measure(self, state: str) -> None:
        answer = self.call()
        if answer.headers["fs-start"] != state:
            raise RuntimeError(f"the call should have been {state} and was {answer.headers['fs-start']}")
        trace = self.system.trace(answer.headers["x-request-id"])
        self.ttft_ms[state].append(answer.ttft_ms)
        self.phases[state].append(phases_ms(trace, sent_ns=answer.sent_ns, ended_ns=answer.token_ns))
        if state != "hot":
            self.pooled.append(trace["pooled"])

    def round(self, hot_calls: int) -> None:
        self.system.wait_asleep("chat")
        self.system.restart_node()
        self.system.wait_asleep("chat")
        self.system.evict_store()
        self.measure("cold")
        for _ in range(2):
            self.system.wait_asleep("chat")
            self.measure("warm")
        for _ in range(hot_calls):
            self.measure("hot")


def peer_round(peer: RayServe, found: dict[str, list[float]], hot_calls: int) -> None:
    value = {"messages": MESSAGES, "max_tokens": 1}
    for state in ("cold", "warm"):
        peer.wait_asleep("chat")
        if state == "cold":
            evict(MODEL)
        with peer.connect() as connection:
            found[state].append(connection.post("/chat", value).expect().total_ms)
            if state == "warm":
                found["hot"] += [connection.post("/chat", value).expect().total_ms for _ in range(hot_calls)]
    peer.wait_asleep("chat")


def main() -> None:
    options = parse_options(__doc__, rounds=8, quick_rounds=2)
    report = Report("warm, the first token of a sleeping model comes within 100 ms of a hot one's")
    theirs: dict[str, list[float]] = {state: [] for state in STATES}
    with contextlib.ExitStack() as stack:
        system = stack.enter_context(running("torch"))
        path = system.deploy("examples/chat/handler.py", "--keep-alive", KEEP_ALIVE_S)
        ours = Ours(system, path, stack.enter_context(system.connect()))
        ours.call()
        peer = stack.enter_context(ray_serve(options.peer_python, model=MODEL)) if options.peer_python else None
        for number in range(options.rounds):
            progress(f"round {number + 1} of {options.rounds}")
            if peer is not None:
                peer_round(peer, theirs, hot_calls=3)
            ours.round(hot_calls=3)
    report.setup = {
        "messages": MESSAGES,
        "keep_alive_s": float(KEEP_ALIVE_S),
        "model_bytes": (MODEL / "model.safetensors").stat().st_size,
        "pooled": f"{sum(ours.pooled)} of {len(ours.pooled)}",
        "peer": peer.about if peer else None,
    }
    report.samples = {"ttft_ms": ours.ttft_ms, "phases_ms": ours.phases, "ray_serve_ttft_ms": theirs}
    tell(report, ours, theirs)
    report.save(options.json)


def tell(report: Report, ours: Ours, theirs: dict[str, list[float]]) -> None:
    hot = median(ours.ttft_ms["hot"])
    rows = [["TTFT of `chat`, ms", *STATES]]
    rows.append(["median (quartiles)", *(spread(ours.ttft_ms[state]) for state in STATES)])
    rows.append(["slowest of", *(f"{fine(max(values))} of {len(values)}" for values in ours.ttft_ms.values())])
    rows.append(["above hot", *(fine(median(ours.ttft_ms[state]) - hot) for state in STATES)])
    rows += phase_rows(ours.phases)
    if theirs["cold"]:
        rows.append(["Ray Serve + transformers", *(spread(theirs[state]) for state in STATES)])
        ratios = [median(theirs[state]) / median(ours.ttft_ms[state]) for state in STATES]
        rows.append(["Ray Serve / ours", *(fine(ratio) for ratio in ratios)])
    report.tell("First token, by where the weights are", rows)
    above = median(ours.ttft_ms["warm"]) - hot
    print(f"\nThe claim {'holds' if above < AIM_MS else 'does not hold'}: warm is {above:.0f} ms above hot.")


if __name__ == "__main__":
    main()
