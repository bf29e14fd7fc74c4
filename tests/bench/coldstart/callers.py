"""Callers that ask again once they are answered: a demand that outlasts the start of new workers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx

from tests.bench.coldstart.fleet import Fleet, Generated
from tests.bench.coldstart.models import Model


@dataclass(slots=True)
class Asked:
    began_ns: int
    answers: dict[int, Generated] = field(default_factory=dict)
    """By the number in the prompt."""
    failed: list[str] = field(default_factory=list)

    def tokens_s(self, fleet: Fleet) -> Iterator[tuple[str, list[float]]]:
        """The node of each call, and when its tokens came: those of one piece at once."""
        for one in self.answers.values():
            pieces, count = len(one.pieces_ns), max(one.tokens, len(one.pieces_ns))
            times = [(one.pieces_ns[number * pieces // count] - self.began_ns) / 1e9 for number in range(count)]
            yield fleet.served_by(one), times


def call_again(fleet: Fleet, model: Model, *, callers: int, tokens: int, lasts_s: float) -> Asked:
    """Each caller asks until that time is over, and waits for its last answer. No two prompts are the same."""
    found = Asked(time.monotonic_ns())
    numbers = itertools.count()

    def ask(_: int) -> None:
        while (time.monotonic_ns() - found.began_ns) / 1e9 < lasts_s:
            number = next(numbers)
            try:
                found.answers[number] = fleet.ask(
                    model, tokens=tokens, prompt=f"Write a story about the number {number}."
                )
            except (RuntimeError, httpx.HTTPError) as error:
                found.failed.append(f"{type(error).__name__}: {error}"[:300])
                return

    with ThreadPoolExecutor(callers) as threads:
        list(threads.map(ask, range(callers)))
    if not found.answers:
        raise RuntimeError(f"{model.name}: no call was answered: {found.failed[:1]}")
    return found
