"""Claim: in a container that waits a function wakes within 60 ms of one in namespaces, and gVisor has a known price.

The same functions with each isolation on one node, in turn: in namespaces, in containers of a Docker engine of the
benchmark's own, and inside gVisor. `hello` (a line of Python) hot, woken by a spare worker and by one that is started
for it; `chat` (SmolLM2-135M) hot, and woken by a spare worker, with its weights in the node's memory. And what the
processes of one worker have of the machine's memory (PSS). In containers "started for it" is two things: one that was
paused, and one that is made from nothing, as a function with `network=True` has it. Beside them, in the same rounds,
Docker's own `docker run` of a Python that prints a line, over the same mounts.

`--quick` leaves `chat` out: tests/e2e/isolation/test_gvisor.py runs a language model inside gVisor.

Run: python -m tests.bench.isolation [--json FILE] [--quick]. Needs root, runsc and dockerd (Debian: apt install runsc
docker.io).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from fleetstart.runtime.contract.function.spec import Isolation, pool_name
from fleetstart.runtime.isolation.root import plan_for_this_python
from fleetstart.runtime.launch.base_image import base_image, shown_mounts
from tests.bench.harness.samples import ROOT, Report, fine, median, parse_options, progress, spread
from tests.bench.harness.system import System, running
from tests.bench.harness.wire import Answer, Connection
from tests.containers.engine import DockerEngine, docker_engine, why_none

ISOLATIONS: tuple[Isolation, ...] = ("namespaces", "container", "gvisor")
KEEP_ALIVE_S = "0.5"
MESSAGES = [{"role": "user", "content": "Why is the sky blue? Answer in one sentence."}]
TOKENS = 48
HELLO = """
import os
from fleetstart.runtime import function

@function(memory="256MiB", ISOLATION)
def hello(name: str = "world") -> str:
    return os.uname().nodename if name == "HOST" else f"Hello, {name}!"
"""
PROFILES = {"hello": "python", "chat": "torch"}
HOT_CALLS = 20
MEASURES = {
    "hot": "`hello`, hot, ms",
    "spare": "`hello`, woken by a spare, ms",
    "fresh": "`hello`, woken by a new worker (a paused container), ms",
    "made": "`hello`, woken by a container made from nothing, ms",
    "docker_run": "`docker run` of Python, beside it, ms",
    "chat_spare": "`chat`, woken by a spare, weights in memory, first token, ms",
    "chat_hot": "`chat`, hot, first token, ms",
    "token": "`chat`, one more token, ms",
}


@dataclass(slots=True)
class Side:
    """One isolation's functions in one system, and what was measured of them."""

    isolation: Isolation
    system: System
    connection: Connection
    found: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in MEASURES})
    spares_before: dict[str, int] = field(default_factory=dict)

    def name(self, function: str) -> str:
        return f"{function}-{self.isolation}"

    def deploy(self, folder: Path, function: str, text: str, keep_alive_s: str) -> None:
        handler = folder / self.name(function) / "handler.py"
        handler.parent.mkdir()
        handler.write_text(text.replace("ISOLATION", f'isolation="{self.isolation}"'))
        if function == "chat":
            (handler.parent / "weights").symlink_to(ROOT / "examples/chat/weights")
        self.system.fs(
            "deploy", str(handler), "--no-probe", "--name", self.name(function), "--keep-alive", keep_alive_s
        )

    def hello(self, measure: str, *, keep: bool = True, function: str = "hello") -> None:
        answer = self.connection.post(f"/fn/{self.name(function)}", {"name": "you"}).expect()
        if keep:
            self._keep(measure, answer.total_ms, answer)

    def chat(self, measure: str, *, keep: bool = True) -> None:
        value = {"messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0, "stream": True}
        answer = self.connection.post(f"/fn/{self.name('chat')}/v1/chat/completions", value).expect()
        if keep:
            self._keep(measure, answer.ttft_ms, answer)
        if keep and measure == "chat_hot":
            self.found["token"].append((answer.total_ms - answer.ttft_ms) / (TOKENS - 1))

    def _keep(self, measure: str, took_ms: float, answer: Answer) -> None:
        hot = not measure.endswith(("spare", "fresh", "made"))
        if (answer.headers["fs-start"] == "hot") is not hot:
            raise RuntimeError(f"the call for {measure} was {answer.headers['fs-start']}")
        if not hot and self.system.trace(answer.headers["x-request-id"])["pooled"] is not measure.endswith("spare"):
            raise RuntimeError(f"the worker for {measure} was no such one")
        self.found[measure].append(took_ms)

    def come_to_rest(self, function: str) -> None:
        """No worker; and, where spares are kept, one in place of the last that was taken."""
        self.system.wait_asleep(self.name(function))
        before = self.spares_before.get(function)
        if before is not None:
            self.system.wait(f"a spare for {self.name(function)}", lambda: self._spares_made(function) > before)
            self.spares_before[function] = self._spares_made(function)

    def begin(self, function: str) -> None:
        """The first call fetches and unpacks the bundle, and lets spares be kept."""
        self.spares_before[function] = self._spares_made(function)
        self.hello("", keep=False) if function == "hello" else self.chat("", keep=False)

    def _spares_made(self, function: str) -> int:
        return self.system.spares_made(pool_name(PROFILES[function], self.isolation))

    def pss_mib(self, engine: DockerEngine) -> float:
        """PSS of all processes of the worker that answers now."""
        self.come_to_rest("hello")
        host = self.connection.post(f"/fn/{self.name('hello')}", {"name": "HOST"}).expect().body
        name = json.loads(host)
        if self.isolation == "container":
            name = engine.docker("inspect", "--format", "{{.Id}}", name).strip()
        return sum(map(pss_kib, processes_of(name))) / 1024


def processes_of(host: str) -> list[int]:
    """Processes of the worker with this name, which is that of its control groups."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                if host in Path(f"/proc/{entry}/cgroup").read_text():
                    found.append(int(entry))
    return found


def pss_kib(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0


def docker_run(engine: DockerEngine) -> float:
    """Milliseconds of `docker run` until a Python in a container has printed a line."""
    plan = plan_for_this_python((), "")
    image, _ = base_image(plan)
    mounts = [f"--volume={mount.source}:{mount.path}:ro" for mount in shown_mounts(plan) if mount.source]
    began = time.perf_counter()
    said = engine.docker(
        "run", "--rm", "--pull=never", "--network=none", "--tmpfs=/tmp", *mounts, image,
        os.path.realpath(sys.executable), "-c", "print('Hello')",
    )  # fmt: skip
    assert said == "Hello\n"
    return 1e3 * (time.perf_counter() - began)


def paused(engine: DockerEngine, system: System) -> bool:
    """True if a container of this system's node waits, paused."""
    label = f"label=fleetstart.node={system.home}/node/container"
    return bool(engine.docker("ps", "--quiet", "--filter", "status=paused", "--filter", label))


def open_sides(
    stack: contextlib.ExitStack, folder: Path, pool_size: str, functions: dict[str, str], engine: DockerEngine
) -> list[Side]:
    pools = [pool_name(PROFILES[function], isolation) for function in functions for isolation in ISOLATIONS]
    system = stack.enter_context(
        running(
            ",".join(pools),
            FS_POOL_SIZE=pool_size,
            FS_POOL_MEMORY="512MiB" if "chat" in functions else "32MiB",
            FS_CONTAINER_ENGINE=engine.address,
        )
    )
    early = {pool for pool in pools if not pool.startswith("torch+")}
    system.wait(f"pools {early}", lambda: early <= set(system.api("/status")["nodes"][0]["profiles"]))
    sides = [Side(isolation, system, stack.enter_context(system.connect())) for isolation in ISOLATIONS]
    for side in sides:
        for function, text in functions.items():
            side.deploy(folder, function, text, KEEP_ALIVE_S)
    return sides


def main() -> None:
    options = parse_options(__doc__, rounds=10, quick_rounds=1)
    if shutil.which("runsc") is None or why_none():
        print(f"{why_none() or 'runsc is not installed (Debian: apt install runsc)'}: there is nothing to measure")
        return
    report = Report("a container that waits wakes as quickly as namespaces, and gVisor has a price that is known")
    functions = {"hello": HELLO}
    if not options.quick:
        functions["chat"] = (ROOT / "examples/chat/handler.py").read_text().replace("LLM(", "LLM(ISOLATION, ")
    with contextlib.ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fs-bench-"))) for _ in range(2)]
        engine = stack.enter_context(docker_engine())
        with_spares = open_sides(stack, folders[0], "1", functions, engine)
        without = open_sides(stack, folders[1], "0", {"hello": HELLO}, engine)
        made = next(side for side in without if side.isolation == "container")
        made.deploy(folders[1], "made", HELLO.replace("ISOLATION", "ISOLATION, network=True"), KEEP_ALIVE_S)
        for side in with_spares:
            for function in functions:
                side.begin(function)
        for side in without:
            side.hello("", keep=False)
        made.hello("", keep=False, function="made")
        memory: dict[str, float] = {side.isolation: side.pss_mib(engine) for side in with_spares}
        for number in range(options.rounds):
            progress(f"round {number + 1} of {options.rounds}")
            for side in with_spares:
                side.come_to_rest("hello")
                side.hello("spare")
                for _ in range(HOT_CALLS):
                    side.hello("hot")
                if "chat" in functions:
                    side.come_to_rest("chat")
                    side.chat("chat_spare")
                    side.chat("chat_hot")
            for side in without:
                side.come_to_rest("hello")
                if side is made:
                    side.system.wait("a paused container", lambda: paused(engine, made.system))
                side.hello("fresh")
            made.system.wait_asleep(made.name("made"))
            made.hello("made", function="made")
            made.found["docker_run"].append(docker_run(engine))
    for side in without:
        by_name = {one.isolation: one for one in with_spares}
        for measure in ("fresh", "made", "docker_run"):
            by_name[side.isolation].found[measure] = side.found[measure]
    report.setup = {
        "keep_alive_s": float(KEEP_ALIVE_S),
        "tokens": TOKENS,
        "runsc": runsc_version(),
        "docker": dockerd_version(),
    }
    report.samples = {side.isolation: side.found for side in with_spares} | {"pss_mib": memory}
    tell(report, {side.isolation: side.found for side in with_spares}, memory)
    report.save(options.json)


def runsc_version() -> str:
    return subprocess.run(["runsc", "--version"], capture_output=True, text=True, timeout=20).stdout.splitlines()[0]


def dockerd_version() -> str:
    return subprocess.run(["dockerd", "--version"], capture_output=True, text=True, timeout=20).stdout.strip()


def tell(report: Report, found: dict[str, dict[str, list[float]]], memory: dict[str, float]) -> None:
    rows = [["median (quartiles)", *ISOLATIONS, "container, ratio", "gvisor, ratio"]]
    for measure, words in MEASURES.items():
        ours = [found[isolation][measure] for isolation in ISOLATIONS]
        if any(ours):
            ratios = [fine(median(one) / median(ours[0])) if one and ours[0] else "" for one in ours[1:]]
            rows.append([words, *(spread(one) if one else "" for one in ours), *ratios])
    kept = [memory[isolation] for isolation in ISOLATIONS]
    ratios = [fine(one / kept[0]) for one in kept[1:]]
    rows.append(["memory of a worker of `hello` (PSS), MiB", *map(fine, kept), *ratios])
    report.tell("Namespaces, containers and gVisor", rows)


if __name__ == "__main__":
    main()
