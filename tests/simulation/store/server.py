"""A simulated Redis server: data, scripts and subscribers, with a clock of its own, and what can go wrong in it.

It is a process of the simulation: it can be stopped, it can refuse writes, and it can be killed and come back with what
its log had on the disk.
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from redis.exceptions import ReadOnlyError, RedisError

from tests.simulation.processes import Process
from tests.simulation.store.data import WRITES, Data
from tests.simulation.store.scripts import Scripts

Command = tuple[bytes, ...]


class Subscriber(Protocol):
    """One subscribed connection."""

    process: Process
    channels: set[bytes]
    patterns: list[bytes]

    def publication(self, pattern: bytes | None, channel: bytes, data: bytes) -> None: ...

    def broken(self) -> None: ...


class Server:
    def __init__(self, process: Process, note: Callable[[str, str], None]) -> None:
        self.process = process
        self._note = note
        self._data = Data(self._now_ms, self._publish)
        self._scripts = Scripts()
        self.subscribers: list[Subscriber] = []
        self.refuses_writes = False
        """As a replica does, or a Redis that cannot write its log or has no memory left."""
        self.unanswered: dict[Any, Callable[[], None]] = {}
        """Requests whose answer will come in time unless the server is stopped, and who then sets their timers: most
        need none."""
        process.on_stop = self._stopped
        self.run_id = "run-1"
        self._on_disk: tuple[dict[bytes, Any], dict[bytes, int]] | None = None
        """What its log has on the disk, while that is not all; None: everything is on the disk."""

    @property
    def data(self) -> Data:
        return self._data

    def _now_ms(self) -> int:
        return self.process.unix_ns() // 1_000_000

    # ── requests ───────────────────────────────────────────────────────────────────────────────────

    def answer(self, commands: Sequence[Command]) -> list[Any]:
        """Runs commands one after the other; errors are among the answers, as in a pipeline."""
        answers: list[Any] = []
        for command in commands:
            try:
                answers.append(self._run(command))
            except RedisError as error:
                answers.append(error)
        return answers

    def _run(self, command: Command) -> Any:
        name, args = command[0], command[1:]
        if name == b"EVALSHA":
            return self._eval(self._scripts.text(args[0]), args[1:])
        if name == b"EVAL":
            return self._eval(args[0], args[1:])
        if name == b"SCRIPT LOAD":
            return self._scripts.load(args[0])
        if name == b"INFO":
            return {"run_id": self.run_id, "master_replid": self.run_id, "role": "master", "connected_slaves": 0}
        if name == b"WAIT":
            return 0
        if name == b"WAITAOF":
            return [0 if self._on_disk is not None and int(args[0]) else 1, 0]
        return self._command(name, args)

    def _eval(self, text: bytes, args: Sequence[bytes]) -> Any:
        count = int(args[0])
        return self._scripts.run(text, args[1 : 1 + count], args[1 + count :], self._command)

    def _command(self, name: bytes, args: Sequence[bytes]) -> Any:
        if self.refuses_writes and name in WRITES:
            raise ReadOnlyError("You can't write against a read only replica.")
        return self._data.execute(name, args)

    def _publish(self, channel: bytes, data: bytes) -> int:
        reached = 0
        for subscriber in list(self.subscribers):
            if channel in subscriber.channels:
                subscriber.publication(None, channel, data)
                reached += 1
            for pattern in subscriber.patterns:
                if fnmatch.fnmatchcase(channel.decode(), pattern.decode()):
                    subscriber.publication(pattern, channel, data)
                    reached += 1
        return reached

    def _stopped(self) -> None:
        for set_timer in self.unanswered.values():
            set_timer()
        self.unanswered.clear()

    # ── faults ─────────────────────────────────────────────────────────────────────────────────────

    def hold_log(self) -> None:
        """From now on its log does not reach the disk: a kill loses what is written until then."""
        if self._on_disk is None:
            self._on_disk = copy.deepcopy((self._data.values, self._data.expires_ms))

    def release_log(self) -> None:
        self._on_disk = None

    def restart(self) -> None:
        """Killed and started again: scripts and connections are gone, and what was not on the disk."""
        self._scripts.flush()
        self.run_id = f"run-{int(self.run_id[4:]) + 1}"
        if self._on_disk is not None:
            self._data.values, self._data.expires_ms = self._on_disk
            self._on_disk = None
        self.break_connections()

    def break_connections(self) -> None:
        for subscriber in list(self.subscribers):
            subscriber.broken()
