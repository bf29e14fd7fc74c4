"""What kept bytes from coming, in words for those who waited for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from fleetstart.runtime.contract.errors import CheckpointInvalid, ChecksumMismatch, FleetError, StoreFailed
from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.contract.weights.manifest import ChunkRange

from ..sources.base import ObjectMissing, ObjectSizeMismatch, SourceError

UPLOAD_AGAIN = "upload the weights again: fs deploy"


class CorruptChunk(Exception):
    """The bytes that came are not the ones that were published."""

    def __init__(self, found: int) -> None:
        super().__init__(f"checksum {found:016x}")
        self.found = found


def fetch_error(checkpoint: CheckpointId, chunk: ChunkRange, error: Exception, tries: int) -> FleetError:
    """Errors: the error itself, if it is none of those that sources have."""
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
    """Its frames hold views, and so the segment's memory, for as long as somebody keeps the error."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


log = logging.getLogger(__name__)

RETRY_DELAYS_S = (0.1, 0.3, 1.0)
"""Between tries of one read: a store that is restarted is back within them, a dead one holds nobody for long."""


def with_retries(read: Callable[[], bytes], what: str) -> bytes:
    """Errors: StoreFailed after the last try, and whatever is no SourceError at once. Blocks."""
    for delay_s in RETRY_DELAYS_S:
        try:
            return read()
        except SourceError as error:
            log.warning("store did not answer, trying again", extra={"what": what, "error": str(error)})
            time.sleep(delay_s)
    try:
        return read()
    except SourceError as error:
        raise store_failed(what, error, len(RETRY_DELAYS_S) + 1) from error
