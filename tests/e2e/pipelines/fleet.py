"""A fleet: a test bed with slow links on which small models are deployed, called and lost; and whether it settled.

A function's weights are noise of its own seed, so that each is cold wherever it was not called. What it must answer is
computed here, by the same engine in one piece.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from safetensors.torch import save_file

from fleetstart.controller.planner.estimates import NodeMeasures
from fleetstart.controller.planner.plan import Plan
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.ledger import LedgerRow, PhaseRow
from fleetstart.runtime.contract.node.orders import WorkerOrder, WorkerStatus
from fleetstart.runtime.contract.process.moving_average import MovingAverage
from fleetstart.runtime.llm.engine.generation import Request
from fleetstart.runtime.llm.engine.sampler import SamplingParams
from fleetstart.runtime.llm.text.tokenizer import Tokenizer
from tests.e2e.systems import isolation
from tests.runtime.llm import models
from tests.servers import NO_CERTIFICATES, wait_until
from tests.testbed import Testbed
from tests.testbed.parts import Node

MBIT = 40
"""Rate of each host's link: a third of a model comes in about a second, the rest of it in two."""
SHORT, LONG = 40, 400
"""Tokens: some that come while the pipeline is one, and some that go on until it is one worker."""
LONGEST = 800
"""Tokens that one worker alone still writes when a host was cut off after the first ones."""
LAYERS = 6
SHAPE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048,
}  # fmt: skip
"""2 MB a layer."""
CONTEXT_TOKENS = 2048
PROMPT = "Once upon a time "
LINK_SHARE = 0.95
"""What TCP's streams get of a link."""
SETTLED_S = 15.0
IDLE_PROCESSES = 3
"""Of a node: the daemon, its one fork server, and a spare worker."""

HOSTS = 4
"""Of the bed. Most tests run three of them."""

ONE = "scale=Scale(max=1, keep_alive_s=600)"
HANDLER = """
from fleetstart.runtime import LLM, SLO, Scale

model = LLM(
    name={name!r}, weights="./weights", dtype="fp32", threads=1, max_batch=4, max_context={context}, memory={memory!r},
    kv_memory="64MiB", {settings},
)
"""


class Function:
    """A deployed model."""

    def __init__(self, name: str, weights: models.Checkpoint) -> None:
        self.name = name
        self._weights = weights
        self._known: dict[tuple[str, int], str] = {}

    def answer(self, tokens: int, prompt: str = PROMPT) -> str:
        """Expected text for the prompt: that of the model in one piece, greedily."""
        longest = max((count for known, count in self._known if known == prompt), default=0)
        if longest != tokens:
            engine = models.engine(
                self._weights, models.native(self._weights, blocks=128), blocks=128, context_tokens=CONTEXT_TOKENS
            )
            ids = Tokenizer(self._weights.file("tokenizer.json")).encode(prompt, add_special_tokens=True)
            request = Request(
                tokens=ids, max_new_tokens=tokens, ignore_eos=True, sampling=SamplingParams(temperature=0.0)
            )
            (deltas,) = models.run(engine, [request])
            self._known[prompt, tokens] = models.text_of(deltas)
        return self._known[prompt, tokens]


class Call:
    """A streamed answer, read by a thread of its own."""

    def __init__(
        self, bed: Testbed, name: str, tokens: int, prompt: str = PROMPT, deadline_s: float = 60.0, **settings: Any
    ) -> None:
        self.id = ""
        self.status = 0
        self.start = ""
        self.pieces: list[tuple[float, str]] = []
        """When each came, and what it was."""
        self.error: dict[str, Any] = {}
        self.cut = ""
        """How the connection ended, if not as it should."""
        self.took_s = 0.0
        self._began_s = time.monotonic()
        body = {
            "model": name, "prompt": prompt, "stream": True, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            **settings,
        }  # fmt: skip
        self._thread = threading.Thread(target=self._run, args=(bed.url, name, body, deadline_s), daemon=True)
        self._deadline_s = deadline_s
        self._thread.start()

    def _run(self, url: str, name: str, body: dict[str, Any], deadline_s: float) -> None:
        try:
            with (
                httpx.Client(base_url=url, trust_env=False, timeout=deadline_s, verify=NO_CERTIFICATES) as client,
                client.stream("POST", f"/fn/{name}/v1/completions", json=body) as response,
            ):
                self.status = response.status_code
                self.id = response.headers.get("x-request-id", "")
                self.start = response.headers.get("fs-start", "")
                self._read(response)
        except httpx.HTTPError as error:
            self.cut = f"{type(error).__name__}: {error}"
        self.took_s = time.monotonic() - self._began_s

    def _read(self, response: httpx.Response) -> None:
        if self.status != 200:
            self.error = json.loads(response.read())["error"]
            return
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                self.error = event["error"]
            for choice in event.get("choices", []):
                self.pieces.append((time.monotonic(), choice["text"]))

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.pieces)

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def wait_for(self, pieces: int) -> None:
        """Waits until that many came. AssertionError if the call ends before."""

        def there() -> bool:
            assert len(self.pieces) >= pieces or not self.ended, f"it ended after {len(self.pieces)} pieces: {self}"
            return len(self.pieces) >= pieces

        wait_until(there, self._deadline_s, what=Later(lambda: f"{pieces} pieces of {self}"))

    def join(self) -> Call:
        """Waits for the call's end, which comes in its deadline."""
        wait_until(lambda: self.ended, self._deadline_s + 2, what=Later(lambda: f"the end of {self}"))
        return self

    def __repr__(self) -> str:
        return f"call: status {self.status}, {len(self.pieces)} pieces, error {self.error}, cut {self.cut!r}"


class Fleet:
    """A bed on which models are deployed, called and watched."""

    def __init__(self, bed: Testbed, folder: Path) -> None:
        self.bed = bed
        self.hosts = len(bed.nodes)
        """How many of them run, the first ones."""
        self._folder = folder
        self._seeds = iter(range(1, 1000))

    def seed(self) -> None:
        """Gives the planner its links' rate, as if it had seen them: at first it takes them for quick ones, and what a
        busy machine shows of them may be any."""
        rate = MovingAverage(self.bed.mbit * 1e6 / 8 * LINK_SHARE, count=100)
        measures = msgspec.json.encode(NodeMeasures(store_bytes_per_s=rate))
        self.bed.controller.stop()
        with self.bed.redis() as client:
            client.hset(keys.MEASURES, mapping={keys.measures_of_node(node.id): measures for node in self.bed.nodes})
        self.bed.controller.start()
        self.bed.wait_ready()

    def deploy(self, name: str, settings: str = ONE, *, memory: str = "192MiB", **shape: Any) -> Function:
        folder = self._folder / name
        (folder / "weights").mkdir(parents=True)
        weights = models.tiny(seed=next(self._seeds), **(SHAPE | shape))
        save_file(dict(weights), folder / "weights" / "model.safetensors")
        for file in ("config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json"):
            (folder / "weights" / file).write_bytes(weights.file(file))
        handler = HANDLER.format(name=name, settings=settings, context=CONTEXT_TOKENS, memory=memory)
        (folder / "handler.py").write_text(handler)
        self.bed.fs("deploy", str(folder / "handler.py"), "--no-probe")
        shutil.rmtree(folder / "weights")
        return Function(name, weights)

    def remove(self, *functions: Function) -> None:
        for function in functions:
            self.bed.fs("rm", function.name, "--yes")
        wait_until(lambda: not self.bed.workers(), SETTLED_S, what="end of the function's workers")

    def remove_left(self) -> None:
        """Removes what a failed test left, so that the next one finds what it expects."""
        if left := [info.name for info in self.bed.status().functions]:
            for name in left:
                self.bed.fs("rm", name, "--yes")
            wait_until(lambda: not self.bed.workers(), SETTLED_S, what="end of the workers that a test left")

    def call(
        self, function: Function, tokens: int, prompt: str = PROMPT, deadline_s: float = 60.0, **settings: Any
    ) -> Call:
        return Call(self.bed, function.name, tokens, prompt, deadline_s, **settings)

    def run_hosts(self, count: int) -> None:
        """The first so many hosts run and are ready, also those that a test has lost; the others are stopped."""
        running, others = self.bed.nodes[:count], self.bed.nodes[count:]
        if count == self.hosts and all(node.alive for node in running):
            return
        self.hosts = count
        for node in others:
            node.stop()
        for node in running:
            if not node.alive:
                node.start()
        self.bed.wait_ready(count)
        names = {node.id for node in running}
        wait_until(lambda: {node.node for node in self.bed.status().nodes} == names, SETTLED_S, what="just these nodes")

    # ── its stages ─────────────────────────────────────────────────────────────────────────────────

    def orders(self, function: Function) -> list[WorkerOrder]:
        """Orders of the function's workers, by stage."""
        found: list[WorkerOrder] = []
        with self.bed.redis() as client:
            for node in self.bed.nodes:
                rows: Any = client.hvals(keys.desired(node.id))
                found += [msgspec.json.decode(row, type=WorkerOrder) for row in rows]
        mine = [order for order in found if order.spec.name == function.name]
        return sorted(mine, key=lambda order: order.stage.index if order.stage is not None else -1)

    def pipeline(self, function: Function, stages: int = 0) -> list[WorkerOrder]:
        """The orders of its cold start, once they are given: a stage on every node."""
        count = stages or self.hosts
        found: list[WorkerOrder] = []

        def ordered() -> bool:
            found[:] = self.orders(function)
            return len(found) == count

        wait_until(ordered, what=Later(lambda: f"{count} stages; plan: {self.plan(found[0]) if found else None}"))
        return found

    def plan(self, order: WorkerOrder) -> Plan:
        """Why the start of this worker is what it is."""
        with self.bed.redis() as client:
            found: Any = client.get(keys.plan(order.worker))
        return msgspec.json.decode(found, type=Plan)

    def node_of(self, order: WorkerOrder) -> Node:
        return self.bed.node(order.node)

    def status_of(self, order: WorkerOrder) -> WorkerStatus | None:
        statuses = self.node_of(order).statuses()
        return next((status for status in statuses if status.worker == order.worker), None)

    def reached(self, order: WorkerOrder, *states: str) -> WorkerStatus:
        def look() -> WorkerStatus | None:
            status = self.status_of(order)
            return status if status is not None and status.state in states and status.link else None

        found = wait_until(look, what=f"stage of {order.node} to be {states}")
        assert found is not None
        return found

    def fetched_unix_ms(self, order: WorkerOrder) -> int:
        """When its weights had come, by the ledger: the worker itself may have served its time meanwhile."""

        def rows() -> list[PhaseRow]:
            with self.bed.redis() as client:
                entries: Any = client.xrange(keys.LEDGER)
            found = [msgspec.json.decode(fields[b"row"], type=LedgerRow) for _, fields in entries]
            mine = [row for row in found if isinstance(row, PhaseRow) and row.worker == order.worker]
            return [row for row in mine if row.phase == "fetch"]

        (fetch,) = wait_until(rows, what=f"the row of the fetch of {order.worker}")
        return fetch.started_unix_ms + fetch.duration_ms

    def wait_growing(self, order: WorkerOrder) -> None:
        """Waits until more than the worker's stage has come in, and not all."""
        assert order.stage is not None
        share = (order.stage.end - order.stage.first) / LAYERS

        def growing() -> bool:
            report = self.node_of(order).report()
            segments = report.segments if report is not None else []
            mine = next((one for one in segments if one.checkpoint == order.spec.weights), None)
            assert mine is None or mine.state != "ready", "it has grown already"
            return mine is not None and mine.ready_bytes > (share + 0.1) * mine.size_bytes

        wait_until(growing, what="growth of the first stage")

    def kill(self, order: WorkerOrder) -> None:
        """Kills the worker's process, as soon as it has one."""
        node = self.node_of(order)
        status = self.reached(order, "starting", "ready")
        wait_until(lambda: _has_process(node, status), what=f"process of {order.worker}")
        node.kill_worker(status)

    # ── afterwards ─────────────────────────────────────────────────────────────────────────────────

    def settled(self, function: Function) -> WorkerStatus:
        """One whole worker, and of the others neither orders, nor statuses, nor processes."""
        left = wait_until(
            lambda: None if self._unsettled(function) else "nothing",
            SETTLED_S,
            what=Later(lambda: self._unsettled(function)),
        )
        assert left == "nothing"
        (worker,) = self.bed.workers(function.name)
        return worker

    def check_after(self, function: Function) -> None:
        """One worker with the whole model is left, and answers at once."""
        self.settled(function)
        call = self.call(function, SHORT).join()
        assert (call.text, call.start, call.error) == (function.answer(SHORT), "hot", {})

    def _unsettled(self, function: Function) -> str:
        workers = self.bed.workers(function.name)
        if [(worker.state, worker.whole) for worker in workers] != [("ready", True)]:
            return "workers " + ", ".join(f"{one.worker} {one.state}, whole: {one.whole}" for one in workers)
        (worker,) = workers
        known = [order.worker for order in self.orders(function)]
        if known != [worker.worker]:
            return f"orders {known}"
        return "; ".join(filter(None, (self._litter(node, worker) for node in self.bed.nodes)))

    def _litter(self, node: Node, worker: WorkerStatus) -> str:
        if not node.alive:
            return ""
        others = [status.worker for status in node.statuses() if status.worker != worker.worker]
        count = len(node.processes()) - (node.id == worker.node)
        wrong = [f"statuses {others}"] if others else []
        if isolation() == "namespaces" and count != IDLE_PROCESSES:  # sandboxes are counted by their own suites
            wrong.append(f"{count} processes beside the worker's, {IDLE_PROCESSES} when idle")
        return f"{node.name}: {', '.join(wrong)}" if wrong else ""


def function_name(request: pytest.FixtureRequest) -> str:
    """The test's own name as that of a function."""
    name: str = request.node.name.removeprefix("test_")
    return name.replace("_", "-").replace("[", "-").strip("]")[-50:].strip("-")


@contextmanager
def serving_fleet(folder: Path, session: pytest.Session) -> Iterator[Fleet]:
    """A fleet; in the end it prints what its parts logged last if a test failed meanwhile."""
    failed_before = session.testsfailed
    with Testbed(nodes=HOSTS, mbit=MBIT, env={"FS_PROFILES": "torch"}) as bed:
        fleet = Fleet(bed, folder)
        fleet.seed()
        yield fleet
        if session.testsfailed > failed_before:
            print(bed.log_tails())


def _has_process(node: Node, status: WorkerStatus) -> bool:
    try:
        return bool(node.pid_of(status))
    except AssertionError:
        return False


class Later(str):
    """Words that are found when they are printed."""

    def __new__(cls, words: Callable[[], str]) -> Later:
        made = super().__new__(cls, "later")  # an empty text would not be printed at all
        made.words = words  # type: ignore[attr-defined]
        return made

    def __str__(self) -> str:
        return str(self.words())  # type: ignore[attr-defined]
