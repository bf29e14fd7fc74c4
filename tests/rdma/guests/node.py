"""The reader's guest as the findings see it: its memory, its connections, and the other guest by its commands."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

from fleetstart.native._rdma import RdmaReader
from tests.rdma.guests import region as shared

PORTS = count(7100)
CALM_S = 30.0
"""Silence that no guest of a busy machine reaches, where it is not what is looked at."""
SILENCE_S = 0.8
"""The default."""
LIMIT_S = 60.0
RANGES = [shared.Range(chunk, chunk * shared.CHUNK_BYTES, shared.CHUNK_BYTES) for chunk in range(shared.CHUNKS)]


class Holder:
    """The other guest, by its commands."""

    def __init__(self) -> None:
        self._link = shared.connect(shared.COMMANDS_PORT).makefile("rw")

    def __call__(self, verb: str, **options: object) -> dict[str, Any]:
        self._link.write(json.dumps({"verb": verb, **options}) + "\n")
        self._link.flush()
        answer: dict[str, Any] = json.loads(self._link.readline())
        assert "failed" not in answer, answer["failed"]
        return answer

    def hold(
        self,
        port: int,
        *,
        ready: int = shared.CHUNKS,
        brings: bool = False,
        allowed: int = shared.CHUNKS,
        silence_s: float = CALM_S,
    ) -> int:
        answer = self("hold", port=port, ready=ready, brings=brings, allowed=allowed, silence_s=silence_s)
        return int(answer["pid"])


class Node:
    """This guest's memory, and connections that read into it."""

    def __init__(self, holder: Holder) -> None:
        self.holder = holder
        self.region, self.memory = shared.new_region(*shared.new_pool())

    def reader(self, port: int, silence_s: float = CALM_S) -> RdmaReader:
        with shared.connect(port) as sock:
            return RdmaReader(sock.fileno(), self.memory, connect_s=30, silence_s=silence_s, stall_s=30)

    def clear(self) -> None:
        for chunk in range(shared.CHUNKS):
            self.region.view(chunk * shared.CHUNK_BYTES, shared.CHUNK_BYTES)[:] = bytes(shared.CHUNK_BYTES)

    def right(self) -> int:
        return sum(shared.is_content(self.region, chunk) for chunk in range(shared.CHUNKS))
