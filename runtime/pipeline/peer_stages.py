"""The first stage's view of the other stages: which have loaded their layers, and whether one is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .frames import Buffer, Dismiss, LinkBroken, Message, StageBroken, StageLoaded
from .links import StageLinks


class PeerStages:
    """State of the other stages. Thread-safe. `on_broken` is called once, with the reason, in a thread of the links."""

    def __init__(self, stages: int, on_broken: Callable[[str], None]) -> None:
        self.stages = stages
        self._on_broken = on_broken
        self._links: StageLinks | None = None
        self._changed = threading.Condition()
        self._loaded: set[int] = set()
        self._dismissed = False
        self.broken = ""
        """Reason why the pipeline is broken; empty while it works."""

    def wait_until_loaded(self, timeout_s: float) -> bool:
        """Checks whether every other stage loaded its layers; False after the timeout or if one is lost."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._loaded) == self.stages - 1 or bool(self.broken), timeout_s)
            return not self.broken and len(self._loaded) == self.stages - 1

    def missing(self) -> list[int]:
        """Stages that have not reported their layers as loaded."""
        with self._changed:
            return [index for index in range(1, self.stages) if index not in self._loaded]

    def dismiss(self) -> None:
        """Dismisses the other stages."""
        self._dismissed = True
        for stage in range(1, self.stages):
            try:
                self.send(stage, Dismiss())
            except LinkBroken:
                continue  # gone already

    def send(self, stage: int, message: Message, payload: Buffer = b"") -> None:
        """Sends a frame to a stage. Errors: LinkBroken."""
        if self._links is None:
            raise LinkBroken("no links yet")
        self._links.send(stage, message, payload)

    def handle(self, stage: int, message: Message) -> None:
        """Handles a message that any stage may send; any other message breaks the pipeline."""
        match message:
            case StageLoaded():
                with self._changed:
                    self._loaded.add(stage)
                    self._changed.notify_all()
            case StageBroken(why=why):
                self.break_up(f"stage {stage}: {why}")
            case _:
                self.break_up(f"stage {stage} sent a {type(message).__name__}")

    def break_up(self, why: str) -> None:
        """Marks the pipeline as broken, once; without effect after `dismiss`."""
        with self._changed:
            if self.broken or self._dismissed:
                return
            self.broken = why
            self._changed.notify_all()
        self._on_broken(why)
