"""What is watched at Redis while a simulation runs: leaders and their fences, versions, orders, kept workers."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import msgspec

from fleetstart.controller.async_invocations.idempotency.silence import KEPT_SILENT_MS, SILENT_MS
from fleetstart.controller.peers.copies import COPIES_MAX
from fleetstart.runtime.contract import redis_keys as keys
from tests.simulation.processes import Process
from tests.simulation.store.server import Command
from tests.simulation.weights import copies_of


class _Spec(msgspec.Struct):
    name: str


class Ordered(msgspec.Struct):
    """The part of an order that is watched."""

    worker: str
    node: str
    epoch: str
    version: int
    spec: _Spec
    wanted: str = "run"


class _Claim(msgspec.Struct):
    owner: str
    invocation: str


_ORDER, _CLAIMS = msgspec.json.Decoder(Ordered), msgspec.json.Decoder(_Claim)
SILENT_NS = (min(SILENT_MS, KEPT_SILENT_MS) - 500) * 1_000_000
"""Silence after which a key may be taken over, as it is stated; whoever takes it has measured it."""


def _sha(name: str) -> bytes:
    text = files("fleetstart.controller").joinpath("state", "lua", f"{name}.lua").read_text()
    return hashlib.sha1(text.encode()).hexdigest().encode()


LEASE, STEP, REGISTRY = _sha("leader_lease"), _sha("apply_scheduler_step"), _sha("registry")
CLAIM = _sha("idempotency")
KEPT, OBSERVED = keys.KEPT.encode(), b"fs:observed:"
_OF_KEPT = (KEPT,)


ASKS_PER_S = 250
"""Requests of a process in one second after which something turns in a circle: the most that work gave was 184."""


class Monitor:
    def __init__(self, world: Any) -> None:
        self._world = world
        self.leaders: dict[int, str] = {}
        """The controller that got each fence."""
        self.versions: dict[tuple[bytes, bytes], bytes] = {}
        """The record under which each version's number was given."""
        self._claims: dict[bytes, tuple[str, Process, int]] = {}
        """Who holds each idempotency key, and when he last said so."""
        self.taken_over: dict[str, Process] = {}
        """Calls that took the key of another one, and the gateway that held it."""
        self.orders: dict[str, Ordered] = {}
        self.kept_ns: dict[str, int] = {}
        """How long each worker has stood in fs:kept, until it was looked at last."""
        self._kept_since_ns: dict[str, int] = {}
        self._asked: Counter[tuple[Process, int]] = Counter()
        """How often each process asked in each second; what was asked while Redis stood still is served at once."""
        self.most: dict[str, int] = {}
        """The most workers that were ordered of each function at a time."""

    def served(self, process: Process, commands: Sequence[Command], answers: Sequence[Any], asked_ns: int) -> None:
        in_second = process, asked_ns // 1_000_000_000
        self._asked[in_second] += 1
        if (count := self._asked[in_second]) == ASKS_PER_S + 1:
            self._world.violated(f"nothing turns in a circle: {process.name} asked {count} times in a second")
        kept = False
        for command, answer in zip(commands, answers, strict=True):
            if command[0] != b"EVALSHA":
                kept = kept or command[1:2] == _OF_KEPT
            elif not isinstance(answer, Exception):
                if command[1] == LEASE and answer[0]:
                    self._led(int(answer[0]), command[5].decode())
                elif command[1] == STEP and answer == 1:
                    self._stepped(command)
                elif command[1] == CLAIM and command[5] and answer[0] == command[5]:
                    self._claimed(process, command[3], command[5])
                elif command[1] == CLAIM and not answer[0]:
                    self._claims.pop(command[3], None)
                elif command[1] == REGISTRY and answer == 1 and command[13]:
                    self._deployed(command[9], command[12], command[13])
        if kept:
            self._kept()

    def _led(self, fence: int, gateway: str) -> None:
        if self.leaders.setdefault(fence, gateway) != gateway:
            self._world.violated(f"one leader a fence: {fence} was given to {self.leaders[fence]} and to {gateway}")
        if fence < max(self.leaders):
            self._world.violated(f"a fence never goes back: {gateway} got {fence} after {max(self.leaders)}")

    def _claimed(self, process: Process, key: bytes, raw: bytes) -> None:
        """A key may be taken from a gateway that is gone, or was silent for as long as is stated."""
        claim, now_ns = _CLAIMS.decode(raw), self._world.loop.now_ns
        before = self._claims.get(key)
        self._claims[key] = (claim.owner, process, now_ns)
        if before is None or before[0] == claim.owner:
            return
        self.taken_over[claim.invocation] = before[1]
        if before[1].alive and now_ns - before[2] < SILENT_NS and not self._world.clock_of_redis_stepped:
            self._world.violated(
                f"an idempotency key stays with a gateway that lives: {claim.invocation} took it after "
                f"{(now_ns - before[2]) / 1e9:.3f} s"
            )

    def _deployed(self, name: bytes, version: bytes, record: bytes) -> None:
        if self._world.redis_lost:
            return  # what a killed Redis has lost was never there
        if self.versions.setdefault((name, version), record) != record:
            self._world.violated(f"a version is one code for ever: {name.decode()}@{version.decode()} was given twice")

    def _stepped(self, command: Command) -> None:
        count = int(command[2])
        written = command[3 + 2 : 3 + count]
        args = command[3 + count + 1 :]
        for index, key in enumerate(written):
            what, field, value = args[5 * index : 5 * index + 3]
            if not key.startswith(b"fs:desired:"):
                continue
            if what == b"set":
                self.orders[field.decode()] = _ORDER.decode(value)
            elif what == b"del":
                self.orders.pop(field.decode(), None)
        self._count()
        if any(key.startswith(b"fs:copies:") for key in written):
            self._count_copies()

    def _count_copies(self) -> None:
        """A checkpoint has one order of a copy, and another while it moves or its node's order is to be deleted."""
        counts = Counter(copy.checkpoint for copy in copies_of(self._world))
        for checkpoint, count in counts.items():
            if count > COPIES_MAX:
                self._world.violated(f"copies do not grow with the nodes: {checkpoint[:8]} has {count} orders")

    def reload(self) -> None:
        """Forgets orders that Redis has lost."""
        data = self._world.server.data.values
        known = {name for node in self._world.nodes for name in data.get(f"fs:desired:{node}".encode(), {})}
        self.orders = {worker: order for worker, order in self.orders.items() if worker.encode() in known}

    def running(self) -> dict[str, int]:
        """Ordered workers by version, without those of nodes that are gone."""
        counts: dict[str, int] = {}
        for order in self.orders.values():
            node = self._world.nodes.get(order.node)
            if order.wanted == "run" and node is not None and node.epoch == order.epoch:
                life = self._world.history.lives.get(order.worker)
                if life is None or not life.ended_ns:
                    version = f"{order.spec.name}@{order.version}"
                    counts[version] = counts.get(version, 0) + 1
        return counts

    def _count(self) -> None:
        counts = self.running()
        for name, count in counts.items():
            self.most[name] = max(self.most.get(name, 0), count)
        self._world.limits(counts)

    def _kept(self) -> None:
        now_ns = self._world.loop.now_ns
        now = {name.decode() for name in self._world.server.data.values.get(KEPT, {})}
        for worker in self._kept_since_ns.keys() - now:
            self.kept_ns[worker] = self.kept_ns.get(worker, 0) + now_ns - self._kept_since_ns.pop(worker)
        for worker in now - self._kept_since_ns.keys():
            self._kept_since_ns[worker] = now_ns

    def kept_for_ns(self, worker: str) -> int:
        since_ns = self._kept_since_ns.get(worker)
        return self.kept_ns.get(worker, 0) + (self._world.loop.now_ns - since_ns if since_ns is not None else 0)
