"""Migrated requests whose new worker fails a step, ends or preempts them: their owner always goes on with them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from fleetstart.runtime.contract.errors import Unavailable
from fleetstart.runtime.llm.distributed.request_migration import MigrationSource, MigrationTarget
from fleetstart.runtime.llm.engine.engine import Engine
from fleetstart.runtime.llm.engine.generation import Request, TokenDelta
from fleetstart.runtime.llm.engine.runner import Batch
from fleetstart.runtime.llm.model.native_decoder import NativeDecoder
from fleetstart.runtime.pipeline.frames import MigrationAborted, MigrationCaughtUp, MigrationHandover, Promoted
from tests.runtime.llm.distributed.test_pipeline_runner import WEIGHTS, alone, request
from tests.runtime.llm.models import engine, native

STEPS = 1000
"""More than any of these requests takes: one that is not done by then never ends."""


class FailsWhenTold:
    """A decoder with one step that fails, when a test says so."""

    def __init__(self, decoder: NativeDecoder) -> None:
        self._decoder = decoder
        self.fails = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def forward(self, batch: Batch) -> Tensor:
        if self.fails:
            self.fails = False
            raise RuntimeError("out of memory")
        return self._decoder.forward(batch)


class AtOnce:
    """The service of an engine that this thread steps."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.deltas: list[TokenDelta] = []

    def do(self, act: Callable[[Engine], list[TokenDelta]]) -> None:
        self.deltas += act(self.engine)

    def step(self) -> None:
        if not self.engine.idle and not self.engine.stalled:
            self.deltas += self.engine.step()


class Lending:
    """An owner of requests and a worker that computes some of them. Messages are delivered when a test says so."""

    def __init__(self, requests: list[Request], *, blocks: int = 64) -> None:
        decoder: Any = FailsWhenTold(native(WEIGHTS, blocks=blocks))
        self.decoder: FailsWhenTold = decoder
        self.owner = AtOnce(engine(WEIGHTS, native(WEIGHTS)))
        self.other = AtOnce(engine(WEIGHTS, decoder, blocks=blocks))
        self.to_owner: list[Any] = []
        self.to_other: list[Any] = []
        owner: Any = self.owner
        other: Any = self.other
        self._source = MigrationSource(owner, lambda stage, message: self.to_other.append(message))
        self._target = MigrationTarget(other, self.to_owner.append)
        self._ids = [self.owner.engine.add(one) for one in requests]

    def offer(self) -> None:
        """The other worker has become whole, and is offered requests that have output."""
        for _ in range(5):
            self.owner.step()
        self._source.on_frame(1, Promoted(0))
        self.tell_other()
        assert self.other.engine.load.migrated_in

    def tell_owner(self) -> None:
        while self.to_owner:
            self._source.on_frame(1, self.to_owner.pop(0))

    def tell_other(self) -> None:
        while self.to_other:
            self._target.on_frame(self.to_other.pop(0))

    def other_until(self, holds: Callable[[], bool]) -> None:
        """The other worker steps until that holds, and the owner does not: it is busy."""
        for _ in range(STEPS):
            if holds():
                return
            self.other.step()
        raise AssertionError("that never holds")

    def move(self) -> None:
        """Requests go on at the other worker, and have some tokens of it."""
        self.offer()
        self.other_until(lambda: self.caught_up == self.other.engine.load.migrated_in)
        self.tell_owner()
        self.tell_other()
        for _ in range(3):
            self.other.step()

    @property
    def caught_up(self) -> int:
        return sum(isinstance(message, MigrationCaughtUp) for message in self.to_owner)

    def finish(self) -> list[list[int]]:
        """Tokens of all requests, once both have nothing more to do."""
        for _ in range(STEPS):
            self.tell_owner()
            self.tell_other()
            self.owner.step()
            self.other.step()
        deltas = self.owner.deltas
        assert {delta.id: delta.finish for delta in deltas if delta.last} == dict.fromkeys(self._ids, "length")
        assert self.owner.engine.idle
        assert not self.other.engine.load.migrated_in
        return [[token for delta in deltas if delta.id == id for token in delta.tokens] for id in self._ids]


def four() -> list[Request]:
    return [request(10 + 20 * seed, 60, seed) for seed in range(4)]


def test_a_step_that_fails_at_the_new_worker_costs_no_token(caplog: pytest.LogCaptureFixture) -> None:
    lending = Lending(four())
    lending.move()
    lending.decoder.fails = True
    with caplog.at_level(logging.CRITICAL):
        lending.other.step()
    assert not any(delta.id < 0 for delta in lending.other.deltas)
    assert lending.finish() == alone(four())


def test_a_step_that_fails_before_the_handover_costs_no_token(caplog: pytest.LogCaptureFixture) -> None:
    """The handover is under way when the sequence is lost: both workers know that the owner has it again."""
    lending = Lending(four())
    lending.offer()
    lending.other_until(lambda: lending.caught_up == 2)
    lending.tell_owner()
    local = lending.other.engine.add(request(20, 60, 9))
    lending.decoder.fails = True
    with caplog.at_level(logging.CRITICAL):
        lending.other.step()
    assert [delta.id for delta in lending.other.deltas] == [local]
    assert lending.finish() == alone(four())


def test_a_handover_of_an_unknown_request_is_given_back() -> None:
    lending = Lending([])
    lending.to_other.append(MigrationHandover(7, [2, 3, 4]))
    lending.tell_other()
    assert lending.to_owner == [MigrationAborted(7)]


def test_a_worker_that_ends_gives_its_migrated_requests_back() -> None:
    lending = Lending(four())
    lending.move()
    assert lending.other.engine.fail_all(Unavailable("the worker is shutting down")) == []
    assert lending.other.engine.idle
    assert lending.finish() == alone(four())


def test_a_request_that_is_computed_twice_before_its_handover_is_handed_over_once() -> None:
    """The new worker runs out of blocks while the owner is busy, and computes the request's tokens again."""
    requests = [request(20, 90, seed) for seed in range(2)]
    lending = Lending(requests, blocks=8)
    lending.other.engine.add(request(60, 50, 9))
    lending.other.step()
    lending.offer()
    scheduler = lending.other.engine.scheduler
    lending.other_until(lambda: bool(scheduler.preemptions) and not scheduler.waiting and not scheduler.pending)
    assert lending.caught_up == 1
    assert lending.finish() == alone(requests)


def test_an_owner_that_is_told_twice_hands_over_once() -> None:
    lending = Lending(four())
    lending.offer()
    lending.other_until(lambda: lending.caught_up == 2)
    lending.to_owner *= 2
    lending.tell_owner()
    assert sum(isinstance(message, MigrationHandover) for message in lending.to_other) == 2
    assert lending.finish() == alone(four())
