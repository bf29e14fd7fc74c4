"""Errors of fetches with messages for the user, and retries of small reads."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from fleetstart.runtime.contract.errors import CheckpointInvalid, ChecksumMismatch, FleetError, StoreFailed
from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.contract.weights.manifest import ChunkRange

from ..sources.errors import ObjectMissing, ObjectSizeMismatch, SourceError

UPLOAD_AGAIN = "upload the weights again: fs deploy"


class CorruptChunk(Exception):
    """A chunk's checksum differs from the manifest's."""

    def __init__(self, found: int) -> None:
        super().__init__(f"checksum {found:016x}")
        self.found = found


def fetch_error(checkpoint: CheckpointId, chunk: ChunkRange, error: Exception, tries: int) -> FleetError:
    """The FleetError for a chunk that could not be fetched. Raises the error itself if sources do not raise such
    ones."""
    what = f"chunk {chunk.index} of {checkpoint[:12]} ({chunk.object})"
    match error:
        case CorruptChunk(found=found):
            return ChecksumMismatch(
                f"chunk {chunk.index} of {checkpoint[:12]} ({chunk.object} bytes {chunk.object_offset}–"
                f"{chunk.object_offset + chunk.size_bytes - 1}): checksum {found:016x}, "
                f"expected {chunk.checksum:016x}",
                hint=f"the object in the store is damaged; {UPLOAD_AGAIN}",
            )
        case ObjectMissing():
            return CheckpointInvalid(f"{what}: the object is not in the store", hint=UPLOAD_AGAIN)
        case ObjectSizeMismatch(expected_bytes=expected, found_bytes=found):
            how = "truncated" if found < expected else "another one"
            return CheckpointInvalid(
                f"{what}: the object is {how}, {expected:,} bytes expected, {found:,} found", hint=UPLOAD_AGAIN
            )
        case SourceError():
            return store_failed(what, error, tries)
        case _:
            raise error


def store_failed(what: str, error: SourceError, tries: int) -> StoreFailed:
    return StoreFailed(
        f"{what}: the store failed {tries} times, last with: {error}",
        hint="check that the object store is up and that the node may read it",
    )


def drop_traceback(error: FleetError) -> FleetError:
    """Removes tracebacks: their frames hold views, and so the segment's memory, as long as the error is referenced."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


log = logging.getLogger(__name__)

RETRY_DELAYS_S = (0.1, 0.3, 1.0)
"""Delays between attempts of one read: a store that restarts is back within them, a dead one delays a start little."""


def with_retries(read: Callable[[], bytes], what: str) -> bytes:
    """Reads, retrying after SourceError. Blocks. Errors: StoreFailed after the last attempt, other errors at once."""
    for delay_s in RETRY_DELAYS_S:
        try:
            return read()
        except SourceError as error:
            log.warning("a read from the store failed, retrying", extra={"what": what, "error": str(error)})
            time.sleep(delay_s)
    try:
        return read()
    except SourceError as error:
        raise store_failed(what, error, len(RETRY_DELAYS_S) + 1) from error
