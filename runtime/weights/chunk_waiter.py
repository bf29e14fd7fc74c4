"""Waits for chunks of a segment that is still being filled.

A reader sleeps on the control block's futex and wakes with its last chunk. A failed segment raises its owner's error at
once; a slow one raises at the worker's start deadline and names the missing chunk.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fleetstart.native import ControlBlock, SegmentFailed

from ..contract.errors import DeadlineExceeded, ErrorInfo, FleetError, error_from


class ChunkWaiter:
    """Waits for chunks of one segment. `deadline_ns`: monotonic time at which every wait ends.

    `want` is called with the chunks that a reader is about to wait for, so that they are fetched first.
    """

    def __init__(
        self, control: ControlBlock, deadline_ns: int, want: Callable[[range], object] = lambda chunks: None
    ) -> None:
        self._control = control
        self._deadline_ns = deadline_ns
        self._want = want
        self._complete = False

    @property
    def chunk_count(self) -> int:
        return self._control.chunk_count

    @property
    def ready_count(self) -> int:
        return self._control.ready_count

    @property
    def complete(self) -> bool:
        """Checks whether every chunk is ready. Then views need not check theirs, which is half of a view's cost."""
        self._complete = self._complete or self._control.state == "ready"
        return self._complete

    def is_ready(self, chunk: int) -> bool:
        """Checks whether a chunk is ready."""
        return self._control.is_ready(chunk)

    def wait(self, what: str, chunks: range) -> None:
        """Waits until all chunks are ready; `what` names their reader. Errors: the segment's own, DeadlineExceeded."""
        if not chunks:
            return
        if not all(map(self._control.is_ready, chunks)):
            self._want(chunks)
        try:
            self._control.wait(chunks[0], chunks[-1], self._left_s())
        except SegmentFailed as error:
            raise _segment_error(error) from error
        except TimeoutError as error:
            raise self._deadline_error(what, chunks) from error

    def wait_shortly(self, what: str, chunk: int, at_most_s: float) -> None:
        """Waits for one chunk for at most `at_most_s`; returns without it then. Errors: as of `wait`."""
        left_s = self._left_s()
        try:
            self._control.wait(chunk, chunk, min(left_s, at_most_s))
        except SegmentFailed as error:
            raise _segment_error(error) from error
        except TimeoutError as error:
            if left_s <= at_most_s:
                raise self._deadline_error(what, range(chunk, chunk + 1)) from error

    def _left_s(self) -> float:
        return max(0.0, (self._deadline_ns - time.monotonic_ns()) / 1e9)

    def _deadline_error(self, what: str, chunks: range) -> DeadlineExceeded:
        missing = [chunk for chunk in chunks if not self.is_ready(chunk)]
        named = f"chunk {missing[0]}" if missing else f"chunk {chunks[0]}"
        needed = f"chunks {chunks[0]} to {chunks[-1]}" if len(chunks) > 1 else f"chunk {chunks[0]}"
        return DeadlineExceeded(
            f"{what} needs {needed}: {named} had not arrived by the worker's start deadline; "
            f"{self.ready_count} of {self.chunk_count} chunks are ready",
            hint="raise start_timeout_s, or look at the node's link to the object store",
        )


def _segment_error(error: SegmentFailed) -> FleetError:
    code, message = error.args
    return error_from(ErrorInfo(code=code, message=message))
