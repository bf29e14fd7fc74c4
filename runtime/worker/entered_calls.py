"""Writes a worker's entered calls to the page that it shares with its node (`contract.node.entered_calls`)."""

from __future__ import annotations

import mmap
import os

from ..contract.node.entered_calls import RING_BYTES, encode_record


class EnteredCallWriter:
    """The worker's side of the ring. Survives in the node's memory whatever becomes of this process."""

    def __init__(self, descriptor: int) -> None:
        """Maps the page and closes the descriptor, so that no user code can take it for a file of its own."""
        try:
            self._ring = mmap.mmap(descriptor, RING_BYTES)
        finally:
            os.close(descriptor)

    def write(self, number: int, request: str) -> None:
        """Records a call. Returns once its node would read it; only then may the call be entered."""
        offset, record = encode_record(number, request)
        self._ring[offset : offset + len(record)] = record
