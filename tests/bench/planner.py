"""Claim: the planner sizes and places thousands of cold starts a second in a cluster of 1,000 nodes.

1,000 nodes of different speed and room, a third of them busy, each holding some checkpoints and with fetches under way;
10,000 functions of 0.3 to 16 GB with and without SLOs. Each decision is carried out: nodes are updated, and as many
workers end as begin. Every node serves chunks to others; beside it, turn by turn, runs the same cluster whose nodes
serve none. The baseline, in the same run, finds the node with the segment or the most memory for a single worker, and
goes through all nodes for it. What it costs to bring one node's state up to date from its
report is measured beside it. CPU time, so that neighbours on the machine do not count.

Run: python -m tests.bench.planner [--json FILE] [--quick]
"""

from __future__ import annotations

import gc
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

from fleetstart.controller.planner.checkpoint_layout import EVERY_LAYER, CheckpointLayout
from fleetstart.controller.planner.cluster import Cluster
from fleetstart.controller.planner.estimates import NodeMeasures, version_prior
from fleetstart.controller.planner.links.contention import Link
from fleetstart.controller.planner.node_state import HeldLayers, NodeState, node_state, with_stage
from fleetstart.controller.planner.plan import Plan, PlanRequest
from fleetstart.controller.planner.selection import make_plan
from fleetstart.runtime.contract.function.spec import SLO
from fleetstart.runtime.contract.ids import CheckpointId, FunctionName, NodeId, WorkerId
from fleetstart.runtime.contract.node.reports import NodeReport, SegmentReport
from fleetstart.runtime.contract.sizes import GIB
from fleetstart.runtime.contract.weights.stage import LayerLayout
from tests.bench.harness.samples import Report, fine, median, parse_options, progress, spread

NODES, FUNCTIONS = 1_000, 10_000
ALIVE = 2_000
"""Starts whose workers are still there: with more the nodes are full."""
STARTS_A_SECOND = 20.0
"""Of simulated time, in which fetches go on."""
MODELS_GB = (0.3, 1.0, 2.2, 7.0, 16.0)
SLOS = (None, SLO(ttft_s=1.5), SLO(ttft_s=5.0, tpot_s=0.2), SLO(ttft_s=20.0))


class World:
    """The cluster, the functions, and what is running."""

    def __init__(self, seed: int, *, peers: bool = True) -> None:
        """`peers`: whether nodes serve chunks to each other."""
        self.random = random.Random(seed)
        layouts = {
            size: CheckpointLayout(LayerLayout(round(size * 5e7), [round(size * 9.5e8 / 32)] * 32))
            for size in MODELS_GB
        }
        self.functions = [self._function(index, layouts) for index in range(FUNCTIONS)]
        nodes = [self._node(index) for index in range(NODES)]
        self.cluster = Cluster(nodes if peers else [replace(state, up=None) for state in nodes])
        self.idle = {state.node: state for state in self.cluster}
        self.now_s = 0.0
        self.sizes: Counter[int] = Counter()
        self._running: deque[list[tuple[NodeId, int]]] = deque()

    def _function(self, index: int, layouts: dict[float, CheckpointLayout]) -> PlanRequest:
        layout = layouts[self.random.choices(MODELS_GB, (40, 25, 20, 10, 5))[0]]
        return PlanRequest(
            function=FunctionName(f"f{index}"), layout=layout, memory_bytes=2 * GIB, kv_bytes=GIB // 4,
            checkpoint=CheckpointId(f"{index:064x}"), measures=version_prior(layout.total_bytes),
            slo=self.random.choice(SLOS),
        )  # fmt: skip

    def _node(self, index: int) -> NodeState:
        rate = self.random.choice((125e6, 250e6, 1.25e9, 2e9)) * self.random.uniform(0.9, 1.1)
        memory_bytes = self.random.choice((32, 64, 192)) * GIB
        held = {f"{self.random.randrange(FUNCTIONS):064x}": HeldLayers(host=EVERY_LAYER) for _ in range(10)}
        return NodeState(
            node=NodeId(f"n{index}"), epoch="e", memory_bytes=memory_bytes, free_bytes=memory_bytes,
            workers=self.random.choice((0, 0, 1)), link=Link(bytes_per_s=rate), disk_bytes_per_s=2e9,
            device_bytes_per_s=12e9, start_s=0.3, up=Link(bytes_per_s=rate),
            held={CheckpointId(name): one for name, one in held.items()},
        )  # fmt: skip

    def start(self) -> tuple[bool, float]:
        """Decides one start; returns if groups were compared, and the CPU seconds of decision and nodes' update."""
        wanted = self.functions[int(FUNCTIONS ** self.random.random()) - 1]
        self.now_s += 1 / STARTS_A_SECOND
        begun_s = time.process_time()
        found = make_plan(wanted, self.cluster, self.now_s)
        self._carry_out(found, wanted)
        took_s = time.process_time() - begun_s
        self.sizes[len(found.stages)] += 1
        self._end_the_oldest()
        return len(found.considered) > 2, took_s

    def _carry_out(self, found: Plan, wanted: PlanRequest) -> None:
        for stage in found.stages:
            state = self.cluster[stage.node]
            self.cluster.put(with_stage(state, stage, WorkerId(f"w{self.now_s}"), wanted.checkpoint, self.now_s))
        self._running.append([(stage.node, stage.reserved_bytes) for stage in found.stages])

    def begin_again(self) -> None:
        for state in self.idle.values():
            self.cluster.put(state)

    def _end_the_oldest(self) -> None:
        if len(self._running) <= ALIVE:
            return
        for node, _ in self._running.popleft():
            self.cluster.put(self.idle[node])


def reports(world: World) -> list[NodeReport]:
    """Reports of the same nodes, as the baseline takes them."""
    return [
        NodeReport(
            node=state.node, epoch="e", address="", memory_bytes=state.memory_bytes, cpus=16,
            memory_used_bytes=state.memory_bytes - state.free_bytes, bytes_per_s={"store": state.link.bytes_per_s},
            segments=[SegmentReport(name, "ready", GIB, GIB) for name in state.held],
        )
        for state in world.cluster
    ]  # fmt: skip


def place(request: PlanRequest, nodes: list[NodeReport]) -> NodeReport | None:
    """The node with the segment, or the most memory, for a single worker."""

    def rank(node: NodeReport) -> tuple[bool, int]:
        has = any(segment.checkpoint == request.checkpoint for segment in node.segments)
        return has, node.memory_bytes - node.memory_used_bytes

    need_bytes = request.memory_bytes + request.segment_bytes
    fitting = [node for node in nodes if node.memory_bytes - node.memory_used_bytes >= need_bytes]
    return max(fitting, key=rank, default=None)


def mean_us(world: World, decisions: int) -> float:
    return sum(took_s for _, took_s in [world.start() for _ in range(decisions)]) / decisions * 1e6


def timed_us(step: Callable[[int], object], times: int) -> float:
    begun_s = time.process_time()
    for number in range(times):
        step(number)
    return (time.process_time() - begun_s) / times * 1e6


def measured(world: World, without_peers: World, *, rounds: int, decisions: int) -> dict[str, list[float]]:
    """Means of each round in µs, and the 99th percentile of its decisions."""
    nodes = reports(world)
    layouts = {one.checkpoint: one.layout for one in world.functions if one.checkpoint is not None}
    for one in (world, without_peers):
        for _ in range(decisions // 4):
            one.start()
    alone_us: list[float] = []
    planned_us, compared_us, placed_us, refreshed_us, slowest_us = [], [], [], [], []
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        gc.collect()
        if number % 2:
            alone_us.append(mean_us(without_peers, decisions))
        started = [world.start() for _ in range(decisions)]
        if not number % 2:
            alone_us.append(mean_us(without_peers, decisions))
        each_us = sorted(took_s * 1e6 for _, took_s in started)
        compared = [took_s * 1e6 for compared, took_s in started if compared]
        planned_us.append(sum(each_us) / len(each_us))
        compared_us.append(sum(compared) / len(compared))
        slowest_us.append(each_us[int(len(each_us) * 0.99)])
        placed_us.append(timed_us(lambda n: place(world.functions[n % 1000], nodes), decisions // 10))

        def refresh(n: int) -> None:
            report = nodes[n % NODES]
            world.cluster.put(node_state(report, [], NodeMeasures(), layouts=layouts, now_s=world.now_s, now_unix_ns=0))

        refreshed_us.append(timed_us(refresh, NODES))
        world.begin_again()
        without_peers.begin_again()
    return {
        "plan_us": planned_us, "without_peers_us": alone_us,
        "compared_us": compared_us, "plan_p99_us": slowest_us, "place_us": placed_us,
        "node_us": refreshed_us,
    }  # fmt: skip


def tell(report: Report, sizes: Counter[int]) -> None:
    """Prints the report's samples, and the group sizes that were chosen."""
    samples = report.samples
    placed_us = median(samples["place_us"])

    def row(name: str, each_us: list[float]) -> list[str]:
        each = median(each_us)
        return [name, f"{1e6 / each:,.0f}", spread(each_us), f"{placed_us / each:.2f}×"]

    report.tell("Decisions with 1,000 nodes and 10,000 functions", [
        ["", "decisions a second", "µs each", "against one worker, all nodes"],
        row("`make_plan`, carried out", samples["plan_us"]),
        row("the same where no node serves chunks", samples["without_peers_us"]),
        row("of it those that compared groups", samples["compared_us"]),
        ["99th percentile", "–", spread(samples["plan_p99_us"]), "–"],
        row("one worker, all nodes gone through", samples["place_us"]),
        ["a node's state from its report", "–", spread(samples["node_us"]), "–"],
    ])  # fmt: skip
    ratios = [peers / alone for peers, alone in zip(samples["plan_us"], samples["without_peers_us"], strict=True)]
    report.tell("Cost of peers", [["", "times as long"], ["a decision where nodes serve chunks", spread(ratios)]])
    whole = sum(sizes.values())
    shares = {size: f"{fine(count / whole * 100)}%" for size, count in sorted(sizes.items())}
    report.tell("What was decided", [
        ["stages", "share of starts"],
        *([str(size) if size else "no room", share] for size, share in shares.items()),
    ])  # fmt: skip


def main() -> None:
    options = parse_options(__doc__, rounds=10, quick_rounds=2)
    decisions = 200 if options.quick else 2_000
    world, without_peers = World(seed=4), World(seed=4, peers=False)
    samples = measured(world, without_peers, rounds=options.rounds, decisions=decisions)
    report = Report("the planner makes thousands of decisions a second for 1,000 nodes and 10,000 functions")
    report.setup = {
        "nodes": NODES,
        "functions": FUNCTIONS,
        "decisions": decisions * options.rounds,
        "clock": "CPU time",
    }
    report.samples = samples
    tell(report, world.sizes)
    report.save(options.json)


if __name__ == "__main__":
    main()
