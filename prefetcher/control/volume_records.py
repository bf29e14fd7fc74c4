"""The records of volumes in Redis, as sessions of volumes use them: a worker is told where Redis does not answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fleetstart.runtime.contract.errors import Unavailable
from fleetstart.runtime.contract.function.volume import VolumeRecord, VolumeVersion

from .redis_state import REDIS_ERRORS, NodeState


class VolumeRecords:
    """The records of volumes, which a session finds and adds versions to."""

    def __init__(self, state: NodeState) -> None:
        self._state = state

    async def find(self, project: str, name: str) -> VolumeRecord | None:
        """The volume's record; None if there is no such volume. Errors: Unavailable."""
        with _told(hint="try again"):
            return await self._state.volume(project, name)

    async def publish(self, project: str, name: str, base: int, version: VolumeVersion) -> VolumeRecord:
        """Adds a version to the volume's record; returns the record.

        Errors: NotFound, Conflict, InvalidInput, Unavailable.
        """
        with _told(hint="commit the same files again: a version that came about after all is found, not made twice"):
            return await self._state.publish_volume(project, name, base, version)


@contextmanager
def _told(*, hint: str) -> Iterator[None]:
    try:
        yield
    except REDIS_ERRORS as error:
        raise Unavailable(f"Redis does not answer: {error}", hint=hint, retry_after_s=1) from error
