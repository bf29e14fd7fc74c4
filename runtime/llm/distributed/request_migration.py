"""Migration of running requests to a worker that has just consolidated (scale up), token for token.

The first stage keeps the request and its client's stream; the other worker computes. It first computes the existing
tokens while the owner continues; then the owner stops between two steps and sends the newer tokens, so the pause is a
few tokens' computation. Only tokens are sent: keys and values follow from them exactly (ServerlessLLM section 5.2). A
lost worker costs time and no token, and so does a step that fails there.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...contract.errors import FleetError
from ...pipeline.frames import (
    LinkBroken,
    Message,
    MigratedToken,
    MigrationAborted,
    MigrationCaughtUp,
    MigrationHandover,
    MigrationMessage,
    MigrationOffer,
    Promoted,
)
from ..engine.engine import Engine
from ..engine.generation import TokenDelta
from ..engine.sampler import SamplingParams
from ..engine.sequences import Sequence as TokenSequence
from ..server.engine_service import EngineService

log = logging.getLogger(__name__)

WORTH_TOKENS = 16
"""Least remaining tokens of a migrated request: a shorter one ends before it has moved."""


def choose_migrations(running: Sequence[tuple[int, int]], lent: Mapping[int, int], to: int) -> list[int]:
    """Chooses the running requests (id, most remaining tokens) that move to a stage; `lent`: requests of each stage.

    Every whole worker gets an even share, of the longest requests first.
    """
    whole = len(lent) + 1
    fair = (len(running) + sum(lent.values())) // whole
    count = max(0, min(len(running) - fair, fair - lent[to]))
    longest = sorted((one for one in running if one[1] >= WORTH_TOKENS), key=lambda one: (-one[1], one[0]))
    return [id for id, _ in longest[:count]]


@dataclass(slots=True)
class _Migration:
    stage: int
    id: int
    handed_over: bool = False


class MigrationSource:
    """Source of migrations: the first stage. Acts and keeps its state in the engine's thread."""

    def __init__(self, service: EngineService, send: Callable[[int, Message], None]) -> None:
        self._service = service
        self._send = send
        self._numbers = itertools.count()
        self._migrations: dict[int, _Migration] = {}
        self._whole: set[int] = set()

    def on_frame(self, stage: int, message: MigrationMessage | None) -> None:
        """Handles a stage's message, from any thread; None if the stage is lost."""
        self._service.do(lambda engine: self._act(engine, stage, message))

    def _act(self, engine: Engine, stage: int, message: MigrationMessage | None) -> list[TokenDelta]:
        match message:
            case None:
                self._whole.discard(stage)
                for number in [number for number, migration in self._migrations.items() if migration.stage == stage]:
                    self._end(engine, number)
            case Promoted(running=running):
                self._whole.add(stage)
                self._offer(engine, stage, running)
            case MigrationCaughtUp(number=number):
                return self._hand_over(engine, number)
            case MigratedToken(number=number, token=token):
                return self._accept(engine, stage, number, token)
            case MigrationAborted(number=number):
                self._end(engine, number)
            case _:
                log.warning("a frame that no target sends", extra={"frame": type(message).__name__})
        return []

    def _offer(self, engine: Engine, stage: int, own: int) -> None:
        """Offers requests to a stage, which already has `own` requests."""
        lent = {
            whole: sum(migration.stage == whole for migration in self._migrations.values()) for whole in self._whole
        }
        lent[stage] += own
        for id in choose_migrations(engine.migration_candidates(), lent, stage):
            found = engine.migration_snapshot(id)
            if found is None:
                continue
            tokens, prompt_count, max_new_tokens, sampling = found
            number = next(self._numbers)
            self._migrations[number] = _Migration(stage, id)
            self._send_or_end(
                engine, number, MigrationOffer(number, tokens, prompt_count, max_new_tokens, asdict(sampling))
            )

    def _hand_over(self, engine: Engine, number: int) -> list[TokenDelta]:
        migration = self._migrations.get(number)
        if migration is None or migration.handed_over:
            return []
        deltas = engine.settle()
        tokens = engine.start_remote(migration.id, lambda: self._drop(number))
        if tokens is None:  # ended meanwhile
            self._drop(number)
            return deltas
        migration.handed_over = True
        self._send_or_end(engine, number, MigrationHandover(number, tokens))
        return deltas

    def _accept(self, engine: Engine, stage: int, number: int, token: int) -> list[TokenDelta]:
        migration = self._migrations.get(number)
        if migration is None or not migration.handed_over or migration.stage != stage:
            return []  # a token in flight when the migration ended
        return engine.accept_remote(migration.id, token)

    def _end(self, engine: Engine, number: int) -> None:
        """Ends a migration; the request continues here."""
        migration = self._migrations.pop(number, None)
        if migration is not None and migration.handed_over:
            engine.resume_locally(migration.id)

    def _drop(self, number: int) -> None:
        migration = self._migrations.pop(number, None)
        if migration is not None:
            try:
                self._send(migration.stage, MigrationAborted(number))
            except LinkBroken:
                return  # the stage is lost

    def _send_or_end(self, engine: Engine, number: int, message: Message) -> None:
        try:
            self._send(self._migrations[number].stage, message)
        except LinkBroken:
            self._end(engine, number)


class MigrationTarget:
    """Target of migrations: a consolidated later stage of the same pipeline."""

    def __init__(self, service: EngineService, send: Callable[[Message], None]) -> None:
        self._service = service
        self._send = send
        self._numbers: set[int] = set()

    def on_frame(self, message: MigrationMessage | None) -> None:
        """Handles the owner's message, from any thread; None if the owner is lost with its requests."""
        self._service.do(lambda engine: self._act(engine, message))

    def _act(self, engine: Engine, message: MigrationMessage | None) -> list[TokenDelta]:
        match message:
            case None:
                for number in list(self._numbers):
                    self._remove(engine, number)
            case MigrationOffer():
                self._accept_offer(engine, message)
            case MigrationHandover(number=number, tokens=tokens):
                if not engine.continue_migrated(_id(number), tokens):  # lost before this came
                    self._send_or_end(MigrationAborted(number))
            case MigrationAborted(number=number):
                self._remove(engine, number)
            case _:
                log.warning("a frame that no source sends", extra={"frame": type(message).__name__})
        return []

    def _accept_offer(self, engine: Engine, lend: MigrationOffer) -> None:
        number = lend.number
        sequence = TokenSequence(
            id=_id(number),
            tokens=lend.tokens[:-1],  # the last one is computed with the tokens still to come
            prompt_count=lend.prompt_count,
            max_new_tokens=lend.max_new_tokens,
        )
        sampling: dict[str, Any] = dict(lend.sampling)
        self._numbers.add(number)
        try:
            engine.add_migrated(
                sequence,
                SamplingParams(**sampling),
                caught_up=lambda: self._send_or_end(MigrationCaughtUp(number)),
                on_token=lambda token: self._send_or_end(MigratedToken(number, token)),
                on_lost=lambda: self._give_back(number),
            )
        except (FleetError, TypeError) as error:
            log.warning("rejected a migrated request", extra={"error": str(error)})
            self._give_back(number)

    def _give_back(self, number: int) -> None:
        """Tells the owner that its request is not computed here (any more)."""
        self._numbers.discard(number)
        self._send_or_end(MigrationAborted(number))

    def _remove(self, engine: Engine, number: int) -> None:
        self._numbers.discard(number)
        engine.remove_migrated(_id(number))

    def _send_or_end(self, message: Message) -> None:
        try:
            self._send(message)
        except LinkBroken as error:
            log.warning("the owner of a migrated request cannot be reached", extra={"error": str(error)})


def _id(number: int) -> int:
    """Sequence id of a migrated request; the worker's own count from 0 up."""
    return -1 - number
