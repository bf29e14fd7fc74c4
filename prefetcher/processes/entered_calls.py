"""Reads which calls a worker had entered, after its death, from the page that the worker wrote to."""

from __future__ import annotations

import fcntl
import os

from fleetstart.runtime.contract.node.entered_calls import RING_BYTES, EnteredCalls, decode_ring


class EnteredCallRing:
    """The node's side of one worker's ring (`contract.node.entered_calls`)."""

    def __init__(self) -> None:
        """Errors: OSError."""
        self.descriptor = os.memfd_create("fleetstart-entered-calls", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, RING_BYTES)
        # Its size is fixed: a worker could otherwise fill the node's memory with it, outside its own limit.
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)

    def read(self) -> EnteredCalls | None:
        """The calls that were entered, once the worker is dead; None if its code has spoilt the ring."""
        return decode_ring(os.pread(self.descriptor, RING_BYTES, 0)) if self.descriptor >= 0 else None

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
