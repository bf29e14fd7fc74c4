"""Runs seeds in forks of this process, one on each processor.

A fork runs a batch of seeds and ends, and its memory with it: no garbage is collected, neither within a seed, where
that would end what a run holds, nor between two. What a seed shows depends on nothing but the seed.
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import islice
from typing import NoReturn

import msgspec

BATCH = 40
"""Seeds of one fork, which has 130 MiB after them."""
SEED_S = 600
"""Time for one seed, which takes less than a second, or some minutes if it is shrunk: after it something turns in a
circle that no clock of the simulation sees, and its fork is killed."""


class Outcome(msgspec.Struct):
    seed: int
    text: str
    """Lines that are printed of it."""
    failed: bool


Work = Callable[[int], Outcome]


class _Batch:
    """The seeds of one fork, and what came of them until now."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self.seeds = seeds
        self.outcomes: list[Outcome] = []
        self._lines = bytearray()
        self.pid = self.pipe = -1

    def start(self, work: Work) -> None:
        self._lines.clear()
        self.pipe, writing = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self.pipe)
            _live(self.seeds[len(self.outcomes) :], work, writing)
        os.close(writing)

    def read(self) -> bool:
        """Takes what its fork says. Returns False once that has ended."""
        data = os.read(self.pipe, 1 << 16)
        self._lines += data
        return bool(data)

    def end(self) -> None:
        """Takes what its fork has left. A seed whose fork has died has failed."""
        os.close(self.pipe)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        lines = self._lines.split(b"\n")[:-1]
        self.outcomes += [msgspec.json.decode(line, type=Outcome) for line in lines]
        if not self.done():
            seed = self.seeds[len(self.outcomes)]
            self.outcomes.append(Outcome(seed, f"\nseed {seed} fails: its process ended with {status}", failed=True))

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.close(self.pipe)
        os.waitpid(self.pid, 0)

    def done(self) -> bool:
        return len(self.outcomes) == len(self.seeds)


def _live(seeds: Sequence[int], work: Work, out: int) -> NoReturn:
    """The life of a fork."""
    gc.disable()
    try:
        for seed in seeds:
            signal.alarm(SEED_S)
            line = msgspec.json.encode(work(seed)) + b"\n"
            while line:
                line = line[os.write(out, line) :]
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def outcomes(seeds: Iterable[int], work: Work, ends_s: float) -> Generator[Outcome, None, None]:
    """Outcomes of the seeds, in their order. After `ends_s` of the monotonic clock no batch begins."""
    left, batches = iter(seeds), deque[_Batch]()
    with selectors.DefaultSelector() as selector:

        def start(batch: _Batch) -> None:
            batch.start(work)
            selector.register(batch.pipe, selectors.EVENT_READ, batch)

        try:
            while True:
                while len(selector.get_map()) < len(os.sched_getaffinity(0)) and time.monotonic() < ends_s:
                    taken = list(islice(left, BATCH))
                    if not taken:
                        break
                    batches.append(_Batch(taken))
                    start(batches[-1])
                if not batches:
                    return
                for key, _ in selector.select():
                    batch: _Batch = key.data
                    if batch.read():
                        continue
                    selector.unregister(batch.pipe)
                    batch.end()
                    if not batch.done():
                        start(batch)
                while batches and batches[0].done():
                    yield from batches.popleft().outcomes
        finally:
            for key in list(selector.get_map().values()):
                key.data.kill()
