"""Faults of a bed: how each kind begins and how it is healed; what died is started again, as its supervisor would."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.bed import ChaosBed
from tests.chaos.history import Fault, Recorder, now_s
from tests.chaos.schedule import WORKER, Planned
from tests.testbed.parts import Part

NOWHERE = "10.77.0.250"
"""No host has it: Redis becomes a replica of a master that it never reaches, and refuses writes."""
STEP_NS = 3600 * 10**9
FLAP_S = (0.06, 0.02)
"""Up and down of a link that loses packets: the kernel here has no netem, so a fourth are lost in bursts."""
SLOW_MBIT = 0.5
"""A link whose short queue drops most of what comes at once."""
FILL_STEP = 1 << 20
SUPERVISED_S = 0.3
RESTART_S = 0.5

STARTED_S = 8.0
"""A part has what it needs to run by then, on a busy machine too."""

Heal = Callable[[], None]


class Faults:
    """Begins and heals faults, and keeps the parts alive."""

    def __init__(self, bed: ChaosBed, history: Recorder, say: Callable[[str], None]) -> None:
        self._bed = bed
        self._history = history
        self._say = say
        self._down: set[Part] = set()
        """Parts that a fault has killed, and that it will start again."""
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._supervise, name="supervisor")]
        self.unexpected: list[str] = []
        """Parts that ended by themselves."""

    def start(self) -> None:
        self._threads[0].start()

    def close(self) -> None:
        """Waits until all are healed."""
        for thread in self._threads[1:]:
            thread.join()
        self._stop.set()
        self._threads[0].join()

    def inject(self, planned: Planned) -> None:
        """Begins a fault, which a thread heals when its time is over."""
        if planned.kind.startswith("clock") and not self._bed.clocks:
            return
        began_s = now_s()
        try:
            heal = self._begin(planned.kind, planned.targets)
        except (AssertionError, OSError) as error:
            self._say(f"{planned.kind} of {', '.join(planned.targets)}: not now ({error})")
            return
        self._say(f"{planned.kind} of {', '.join(planned.targets)} for {planned.lasts_s:.1f} s")
        thread = threading.Thread(target=self._heal_later, args=(planned, began_s, heal))
        self._threads.append(thread)
        thread.start()

    def _heal_later(self, planned: Planned, began_s: float, heal: Heal) -> None:
        time.sleep(planned.lasts_s)
        heal()
        fault = Fault(at_s=began_s, healed_s=now_s(), kind=planned.kind, targets=list(planned.targets))
        self._history.write(fault)

    def _begin(self, kind: str, targets: tuple[str, ...]) -> Heal:
        bed, first = self._bed, targets[0]
        match kind:
            case "kill" if first == WORKER:
                return self._kill_worker()
            case "kill":
                return self._kill(bed.part_of(first))
            case "stop":
                part = bed.part_of(first)
                part.pause()
                return part.resume
            case "part":
                bed.cut_between(*targets)
                return lambda: bed.mend_between(*targets)
            case "cut":
                bed.cut(first)
                return lambda: bed.mend(first)
            case "lose packets":
                return self._flap(first)
            case "slow link":
                bed.limit(first, SLOW_MBIT)
                return lambda: bed.limit(first, bed.mbit)
            case "maxmemory":
                return self._configure("maxmemory", "1", "0")
            case "readonly":
                return self._replica()
            case "full disk":
                return self._fill(bed.disks[bed.part_of(first)])
            case "descriptors":
                return self._no_descriptors(bed.part_of(first))
            case _:
                return self._step(bed.clocks[first], STEP_NS if kind == "clock forward" else -STEP_NS)

    # ── kinds ──────────────────────────────────────────────────────────────────────────────────────

    def _kill(self, part: Part) -> Heal:
        self._down.add(part)
        part.kill()

        def heal() -> None:
            if not part.alive:  # else another fault's end has started it
                part.start()
            self._down.discard(part)

        return heal

    def _kill_worker(self) -> Heal:
        alive = [(node, status) for node in self._bed.nodes for status in node.statuses() if status.state == "ready"]
        assert alive, "no worker is ready"
        node, status = alive[int(time.monotonic_ns()) % len(alive)]
        node.kill_worker(status)
        return lambda: None

    def _flap(self, host: str) -> Heal:
        over = threading.Event()

        def flap() -> None:
            while not over.wait(FLAP_S[0]):
                self._bed.cut(host)
                over.wait(FLAP_S[1])
                self._bed.mend(host)

        thread = threading.Thread(target=flap)
        thread.start()

        def heal() -> None:
            over.set()
            thread.join()

        return heal

    def _configure(self, name: str, value: str, after: str) -> Heal:
        with self._bed.redis() as client:
            client.config_set(name, value)
        return lambda: self._redis_again(lambda client: client.config_set(name, after))

    def _replica(self) -> Heal:
        with self._bed.redis() as client:
            client.execute_command("REPLICAOF", NOWHERE, "1")
        return lambda: self._redis_again(lambda client: client.execute_command("REPLICAOF", "NO", "ONE"))

    def _redis_again(self, command: Callable[[Any], object]) -> None:
        """Redis may have been killed meanwhile: a new one has none of this."""
        with contextlib.suppress(Exception), self._bed.redis() as client:
            command(client)

    def _fill(self, disk: Path) -> Heal:
        path = disk / "fill"
        with path.open("wb") as file, contextlib.suppress(OSError):
            size = 0
            while True:
                os.posix_fallocate(file.fileno(), size, FILL_STEP)
                size += FILL_STEP
        with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        return lambda: path.unlink(missing_ok=True)

    def _no_descriptors(self, part: Part) -> Heal:
        pid = part.pid
        age_s = time.time() - psutil.Process(pid).create_time()
        assert age_s > STARTED_S, f"{part.name} has just started, and may end if it lacks what a start takes"
        used = max(map(int, os.listdir(f"/proc/{pid}/fd")))
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(used + 1, before[1]), before[1]))

        def heal() -> None:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, before)

        return heal

    def _step(self, offset: Path, by_ns: int) -> Heal:
        def write(ns: int) -> None:
            with offset.open("r+b") as file:
                file.write(ns.to_bytes(8, "little", signed=True))

        write(by_ns)
        return lambda: write(0)

    # ── supervision ────────────────────────────────────────────────────────────────────────────────

    def _supervise(self) -> None:
        """Starts again what ended without being killed by a fault."""
        while not self._stop.wait(SUPERVISED_S):
            for part in self._bed.parts:
                if part in self._down or part.alive:
                    continue
                assert part.process is not None
                text = f"{part.name} ended with {part.process.returncode}: {_last_line(part)}"
                self.unexpected.append(text)
                self._say(text)
                time.sleep(RESTART_S)
                part.start()


def _last_line(part: Part) -> str:
    lines = part.log().splitlines()
    return lines[-1][:200] if lines else ""
