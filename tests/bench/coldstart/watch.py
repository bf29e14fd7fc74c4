"""Watch over a cold start while its calls run: the hosts it takes, and when each of its workers is whole."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from tests.bench.coldstart.fleet import CALL_S, Fleet, Worker
from tests.bench.coldstart.models import Model

POLL_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A worker that serves and needs no other."""

    index: int
    """Of the stage that it was; 0 also of one that was none."""
    staged: bool
    node: str
    at_ns: int


class Watch:
    """Looks from `start` to `end`, in a thread of its own."""

    def __init__(self, fleet: Fleet, model: Model) -> None:
        self.hosts: set[str] = set()
        self._fleet = fleet
        self._model = model
        self._whole: dict[str, Whole] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> list[Whole]:
        """Stops; the workers that became whole, in the order of time."""
        self._over.set()
        self._thread.join()
        return sorted(self._whole.values(), key=lambda one: one.at_ns)

    def _run(self) -> None:
        ends_s = time.monotonic() + CALL_S
        while not self._over.wait(POLL_S) and time.monotonic() < ends_s:
            for worker in self._fleet.workers(self._model):
                self.hosts.add(worker.order.node)
                if worker.status.whole and worker.status.endpoint and worker.order.worker not in self._whole:
                    self._whole[worker.order.worker] = _whole(worker)


def _whole(worker: Worker) -> Whole:
    age_ns = time.time_ns() - worker.status.changed_unix_ns
    return Whole(
        index=worker.index,
        staged=worker.order.stage is not None,
        node=worker.order.node,
        at_ns=time.monotonic_ns() - age_ns,
    )
