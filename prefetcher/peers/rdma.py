"""Reads from a peer's memory by RDMA where both nodes can, and by TCP from where RDMA left off.

The bytes of RDMA are not encrypted: it is for networks that their operators declared private. What a reader may read is
the memory of one segment, as long as its connection lives: the holder ends it with the grant.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fleetstart.native import Completion, NativeError, Region

from ..network.rdma_devices import rdma_devices

if TYPE_CHECKING:
    from fleetstart.native._rdma import RdmaMemory

OUTSTANDING = 32
"""Ranges asked for at once."""
WAIT_S = 10.0
"""Wait of a peer for a range that it does not have yet."""
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Range:
    """A range of a segment, in one slab: a chunk or several."""

    number: int
    offset: int
    size_bytes: int


class RangeReader(Protocol):
    """One connection to a peer, whatever carries the bytes: `TcpReader` and `RdmaReader`."""

    def submit(self, request: int, offset: int, size_bytes: int, wait_s: float = 0.0) -> None: ...
    def poll(self, timeout_s: float) -> list[Completion]: ...
    def cancel(self) -> None: ...
    @property
    def error(self) -> str | None: ...


class RangesFailed(Exception):
    """No connection brought all ranges. `missing` are those that did not come."""

    def __init__(self, why: str, missing: Sequence[Range]) -> None:
        super().__init__(why)
        self.missing = missing


def register(region: Region, size_bytes: int, slab_bytes: int, slabs: Sequence[int]) -> RdmaMemory | None:
    """Registers the slabs at these positions of a region with the node's first usable RDMA device. Once for a segment:
    its pages are pinned from here on. None where there is no such device. Errors: OSError."""
    devices = [device for device in rdma_devices() if device.usable]
    if not devices:
        return None
    from fleetstart.native._rdma import RdmaDevice, RdmaMemory  # present: a device was found by it

    memory = RdmaMemory(RdmaDevice(devices[0].name))
    for slab in sorted(slabs):
        offset = slab * slab_bytes
        memory.add(region, offset, min(slab_bytes, size_bytes - offset))
    return memory


def read_ranges(
    ranges: Sequence[Range],
    connect: Sequence[Callable[[], RangeReader]],
    stopped: Callable[[], bool] = lambda: False,
) -> Generator[tuple[Range, int], None, None]:
    """Each range with its xxh3 as it comes, in the order of arrival, each once.

    `connect` makes the connections in the order of preference, RDMA first: the next one is made when the one before
    has failed, and continues with what is left. Errors: RangesFailed.
    """
    left = {one.number: one for one in ranges}
    reasons: list[str] = []
    for make in connect:
        if stopped():
            reasons.append("stopped")
            break
        try:
            reader = make()
        except (OSError, NativeError) as error:
            reasons.append(str(error) or type(error).__name__)
            continue
        try:
            for number, checksum in _read(reader, left, stopped):
                yield left.pop(number), checksum
            return
        except (OSError, NativeError) as error:
            reasons.append(str(error))
        finally:
            _end(reader)
    raise RangesFailed("; ".join(reasons) or "there is no way to the peer", list(left.values()))


def _read(reader: RangeReader, left: dict[int, Range], stopped: Callable[[], bool]) -> Iterator[tuple[int, int]]:
    """Errors: NativeError, if it does not bring all."""
    to_ask = iter(list(left.values()))
    outstanding = 0
    while True:
        while outstanding < OUTSTANDING and (one := next(to_ask, None)) is not None:
            reader.submit(one.number, one.offset, one.size_bytes, WAIT_S)
            outstanding += 1
        if not outstanding:
            return
        if stopped():
            raise NativeError("stopped")
        completions = reader.poll(POLL_S)
        outstanding -= len(completions)
        bad = ""
        for completion in completions:
            if completion.status == "ok":
                yield completion.request, completion.checksum
            else:
                bad = f"range {completion.request} is {completion.status}"
        if bad:
            raise NativeError(reader.error or bad)


def _end(reader: RangeReader) -> None:
    """After this the connection writes nothing into memory any more."""
    reader.cancel()
    while reader.poll(POLL_S):
        pass
