"""One simulation: processes, network, Redis, workers and clients, from a plan to what it shows.

First all are started and functions deployed; then there is work and faults; then the faults end, and within a bounded
time everything must have settled. What must hold is in `invariants`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.simulation.clients import Clients
from tests.simulation.controllers import SimulatedController
from tests.simulation.faults import Faults
from tests.simulation.invariants import Violation, check_end
from tests.simulation.loop import SimulatedLoop, Stuck
from tests.simulation.monitor import Monitor
from tests.simulation.network import Network
from tests.simulation.nodes import SimulatedNode
from tests.simulation.objects import Objects
from tests.simulation.plan import Plan
from tests.simulation.processes import CURRENT, EPOCH_NS, Process
from tests.simulation.store.server import Command, Server
from tests.simulation.workers import History, in_process

BEGIN_S = 30.0
"""Time to start and deploy."""
SLACK = 0
"""Workers beyond a limit that may be ordered for a moment."""


class World:
    runs = 0
    """Simulations that this process has run."""

    def __init__(self, plan: Plan, *, traced: bool = False) -> None:
        self.plan = plan
        self.chance = random.Random(f"chance {plan.seed}")
        self.loop = SimulatedLoop(random.Random(f"turns {plan.seed}"))
        self.network = Network(random.Random(f"network {plan.seed}"))
        self.network.on_served = self._served
        self.trace: list[str] | None = [] if traced else None
        self.errors: list[str] = []
        self.faulty = False
        """True if faults happen now."""
        self.processes: list[Process] = []
        self.server = Server(self.process("redis"), self.note)
        self.store = Objects(self)
        self.history = History()
        self.monitor = Monitor(self)
        self.controllers: dict[str, SimulatedController | None] = {}
        self.nodes: dict[str, SimulatedNode | None] = {}
        self.starts = 0
        self.redis_lost = False
        """True if Redis has lost what it had taken."""
        self.settled_s = 0.0
        """How long it took after the faults until all was as it must be."""
        self.waiting: dict[asyncio.Future[Any], tuple[Process, Process]] = {}
        """Requests under way: who asks, and who is asked."""
        self.clock_errors_ns: dict[str, int] = {}
        self.home = Path()
        self.clients = Clients(self, self.process("clients"))
        self.faults = Faults(self)

    # ── what all parts ask for ─────────────────────────────────────────────────────────────────────

    @property
    def clock_of_redis_stepped(self) -> bool:
        return self.redis_lost or any(one.kind == "step clock" and one.target == "redis" for one in self.plan.faults)

    def unix_ms(self) -> int:
        """The true time of day."""
        return (EPOCH_NS + self.loop.now_ns) // 1_000_000

    def run_s(self) -> float:
        """How long a call runs."""
        most_s = self.plan.pace.run_most_s
        return self.chance.uniform(0.5, most_s) if self.chance.random() < 0.15 else self.chance.uniform(0.002, 0.15)

    def process(self, name: str) -> Process:
        process = Process(name, self.loop, random.Random(f"{name} {self.plan.seed} {len(self.processes)}"))
        self.processes.append(process)
        return process

    def note(self, what: str, text: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.loop.now_ns / 1e9:11.6f} {what:<8} {text}")

    def violated(self, what: str) -> None:
        """Ends the run with what does not hold."""
        if what not in self.errors:
            self.note("WRONG", what)
            self.errors.append(what)

    def limits(self, counts: dict[str, int]) -> None:
        """Checks the numbers of ordered workers."""
        most = {one.name: one.most for one in self.plan.functions}
        for version, count in counts.items():
            limit = most[version.partition("@")[0]]
            if count > limit + SLACK:
                self.violated(f"max is never exceeded: {version} has {count} workers, and max is {limit}")
        if self.plan.quota and sum(counts.values()) > self.plan.quota + SLACK:
            self.violated(f"a quota is never exceeded: {counts} workers, and {self.plan.quota} may be")

    def answer(self, sender: Process, request: asyncio.Future[Any], value: Any) -> None:
        """Sends an answer, or an error that a connection ends with, to whoever asked."""
        asked = self.waiting.get(request)
        if asked is None:
            return
        delay_s = self.network.between(sender, asked[0])
        if delay_s is not None:
            self.loop.call_later(delay_s, _settle, request, value, context=in_process(asked[0]))

    def disconnect(self, process: Process, error: Exception) -> None:
        """Ends the connections to a process that is gone."""
        for request, (asker, asked) in list(self.waiting.items()):
            if asked is process:
                self.loop.call_later(0.0005, _settle, request, error, context=in_process(asker))

    def _served(
        self, process: Process, commands: Sequence[Command], answers: list[Any], lost: bool, asked_ns: int
    ) -> None:
        self.monitor.served(process, commands, answers, asked_ns)
        if self.trace is not None:
            for command, answer in zip(commands, answers, strict=True):
                end = " (answer lost)" if lost else ""
                words = " ".join(_short(word) for word in command)
                self.note(process.name, f"{words} -> {_short(answer)}{end}")

    # ── processes ──────────────────────────────────────────────────────────────────────────────────

    def start_controller(self, name: str) -> None:
        process = self._started(name)
        home = self.home / name
        context = in_process(process)
        controller = context.run(SimulatedController, self, process, home, f"{name}-{self.starts}")
        self.controllers[name] = controller
        self.loop.spawn(process, controller.run())

    def start_node(self, name: str) -> None:
        process = self._started(name)
        context = in_process(process)
        node = context.run(SimulatedNode, self, process, name, f"epoch-{self.starts}")
        self.nodes[name] = node
        self.loop.spawn(process, node.run()).add_done_callback(lambda done: self._ended(name, done))

    def _ended(self, name: str, done: asyncio.Task[Any]) -> None:
        """A process has ended by itself."""
        if not done.cancelled():
            self.violated(f"no process ends by itself: {name} did with {done.exception()!r}")

    def _started(self, name: str) -> Process:
        self.starts += 1
        process = self.process(name)
        process.clock_error_ns = self.clock_errors_ns.get(name, 0)
        self.note(name, "starts")
        return process

    # ── the run ────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Runs all of it; `errors` has what did not hold."""
        self.home = Path(tempfile.mkdtemp(prefix="simulation-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        handler = _Log(self)
        root = logging.getLogger("fleetstart")
        level = root.level
        root.addHandler(handler)
        root.setLevel(logging.INFO if self.trace is not None else logging.ERROR)
        token = CURRENT.set(self.loop.world)
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._run())
        except (Violation, Stuck) as error:
            self.violated(str(error))
        except TimeoutError:
            self.violated("the simulation itself waited too long")
        finally:
            for unheard in self.loop.errors:
                self.violated(f"nobody awaited: {unheard}")
            CURRENT.reset(token)
            root.removeHandler(handler)
            logging.disable(logging.CRITICAL)
            self._bury()
            logging.disable(logging.NOTSET)
            root.setLevel(level)
            shutil.rmtree(self.home, ignore_errors=True)

    async def _run(self) -> None:
        for number in range(self.plan.nodes):
            self.start_node(f"node{number}")
        for number in range(self.plan.controllers):
            self.start_controller(f"gw{number}")
        async with asyncio.timeout(BEGIN_S):
            await self.clients.begin()
        self.faulty = True
        await asyncio.gather(self.clients.work(self.plan.chaos_s), self.faults.run())
        self.faulty = False
        self.note("world", "faults are over")
        await check_end(self)

    def _bury(self) -> None:
        for controller in self.controllers.values():
            if controller is not None and controller.process.alive:
                controller.process.alive = False
                with contextlib.suppress(OSError):
                    controller.killed()
        for process in (*self.processes, self.loop.world):
            process.alive = False
            self.loop.bury(process)
        asyncio.set_event_loop(None)
        self.loop.close()


def _settle(request: asyncio.Future[Any], value: Any) -> None:
    if request.done():
        return
    if isinstance(value, Exception):
        request.set_exception(value)
    else:
        request.set_result(value)


def _short(value: Any) -> str:
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return text if len(text) <= 160 else f"{text[:160]}… ({len(text)})"


class _Log(logging.Handler):
    """Takes the product's log: into the trace, and as a violation what it says of its own faults."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        process = CURRENT.get()
        name = process.name if process is not None else ""
        standard = logging.LogRecord("", 0, "", 0, "", (), None).__dict__.keys()
        extra = {key: value for key, value in record.__dict__.items() if key not in standard and key != "taskName"}
        self._world.note(name, f"log: {record.levelname.lower()}: {record.getMessage()} {extra or ''}".rstrip())
        if record.exc_info and record.exc_info[1] is not None:
            formatter = logging.Formatter()
            self._world.violated(f"{name}: {record.getMessage()}: {formatter.formatException(record.exc_info)}")
        elif "impossible" in record.getMessage():
            self._world.violated(f"{name}: {record.getMessage()} {extra}")
