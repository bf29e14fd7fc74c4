"""Waiting for the chunks of a segment that is still being filled, and why waiting ended without them.

A reader sleeps on the control block's futex and wakes with its last chunk. A failed segment raises the error that
its owner gave, at once; a slow one raises at the worker's start deadline and says which chunk had not come.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fleetstart.native import ControlBlock, SegmentFailed

from ..contract.errors import DeadlineExceeded, ErrorInfo, FleetError, error_from


class ChunkWaiter:
    """The chunks of one segment as they come. `deadline_ns` is monotonic: the last moment to wait for any.

    `want` is told which chunks a reader is about to wait for, so that they may come before others.
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
        """Whether every chunk is there. Then nobody need ask for any: half the price of a view is in asking."""
        self._complete = self._complete or self._control.state == "ready"
        return self._complete

    def is_ready(self, chunk: int) -> bool:
        return self._control.is_ready(chunk)

    def wait(self, what: str, chunks: range) -> None:
        """Returns when all of them are there; `what` needs them. Errors: the segment's own, DeadlineExceeded."""
        if not chunks:
            return
        if not all(map(self._control.is_ready, chunks)):
            self._want(chunks)
        try:
            self._control.wait(chunks[0], chunks[-1], self._left_s())
        except SegmentFailed as error:
            raise _own(error) from error
        except TimeoutError as error:
            raise self._late(what, chunks) from error

    def wait_shortly(self, what: str, chunk: int, at_most_s: float) -> None:
        """The same for one chunk, but returns without it after a while, for those who could do something else."""
        left_s = self._left_s()
        try:
            self._control.wait(chunk, chunk, min(left_s, at_most_s))
        except SegmentFailed as error:
            raise _own(error) from error
        except TimeoutError as error:
            if left_s <= at_most_s:
                raise self._late(what, range(chunk, chunk + 1)) from error

    def _left_s(self) -> float:
        return max(0.0, (self._deadline_ns - time.monotonic_ns()) / 1e9)

    def _late(self, what: str, chunks: range) -> DeadlineExceeded:
        missing = [chunk for chunk in chunks if not self.is_ready(chunk)]
        named = f"chunk {missing[0]}" if missing else f"chunk {chunks[0]}"
        needed = f"chunks {chunks[0]} to {chunks[-1]}" if len(chunks) > 1 else f"chunk {chunks[0]}"
        return DeadlineExceeded(
            f"{what} needs {needed}: {named} had not come by the worker's start deadline; "
            f"{self.ready_count} of {self.chunk_count} chunks are there",
            hint="raise start_timeout_s, or look at the node's link to the object store",
        )


def _own(error: SegmentFailed) -> FleetError:
    code, message = error.args
    return error_from(ErrorInfo(code=code, message=message))
