"""Runner of a model that is split over several devices, in the process of the first rank.

Each step is sent to the other ranks, and computed here meanwhile; the ranks meet in the layers' sums. If a step fails
in any rank, the others wait for a sum that never comes, and keys and values of the ranks differ: the group is lost.
"""

from __future__ import annotations

from typing import NoReturn, Protocol

from ..engine.runner import Batch, Decoder, LocalRunner, StepOutput


class OtherRanks(Protocol):
    """The ranks beside the first one."""

    def send(self, batch: Batch) -> None:
        """Starts a step in them. Errors: OSError if one is gone."""
        ...

    def lost(self, reason: str) -> NoReturn:
        """Ends the group."""
        ...


class TensorParallelRunner:
    """Runner over the first rank's decoder and the other ranks, one step at a time."""

    depth = 1
    stalled = False
    asynchronous = False

    def __init__(self, decoder: Decoder, ranks: OtherRanks) -> None:
        self._own = LocalRunner(decoder)
        self._ranks = ranks

    def submit(self, batch: Batch) -> None:
        try:
            self._ranks.send(batch)
        except OSError as error:
            self._ranks.lost(f"a step could not be sent: {error}")
        self._own.submit(batch)

    def collect(self) -> StepOutput:
        try:
            return self._own.collect()
        except Exception as error:
            self._ranks.lost(f"a step failed in the first rank: {error}")

    def drop(self) -> None:
        self._own.drop()
