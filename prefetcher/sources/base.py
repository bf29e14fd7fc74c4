"""The source protocol. Implementations: a local folder (`folder`), an S3 bucket (`s3`); errors in `errors`.

A source reads and reports errors; it does not retry and knows nothing of checkpoints. Its reads block and release
the GIL: they belong in threads. Peers have chunks and no objects: they are `fetch.chunk_sources` at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from fleetstart.runtime.contract.object_keys import is_key

from .errors import ObjectMissing
from .throttle import BackgroundThrottle

PAGE_BYTES = 4096
"""Alignment of direct reads: offset, address and length."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The buffer for the next `size_bytes` of an object: `room`, a multiple of PAGE_BYTES if possible, whose rest
    stays zero."""

    size_bytes: int
    room: memoryview

    @property
    def into(self) -> memoryview:
        return self.room[: self.size_bytes]


@dataclass(frozen=True, slots=True)
class ObjectRange:
    """A range of an object of `object_bytes`, from `offset` on, read into consecutive pieces."""

    key: str
    object_bytes: int
    offset: int
    pieces: Sequence[Piece]
    throttle: BackgroundThrottle | None = None
    """Set for background reads."""


class Source(Protocol):
    """A store of objects. Thread-safe. Keys are relative, `/`-separated.

    Errors of both reads: ObjectMissing, SourceError; of a range also ObjectSizeMismatch and ReadCancelled.
    """

    run_bytes: int
    """Largest range worth requesting at once."""
    threads: int
    """Threads that saturate it; 0 if that depends on the network, and the node's setting decides."""

    def read_object(self, key: str, limit_bytes: int) -> bytes:
        """A small object, whole. ValueError if it is larger than the limit, before it is read."""
        ...

    def read(self, asked: ObjectRange, stopped: Callable[[], bool]) -> Iterator[int]:
        """Fills the pieces in order and yields the xxh3 of each once it is complete."""
        ...


def check_key(key: str) -> str:
    """Rejects keys that would leave the store: they hold ids from outside. Errors: ObjectMissing."""
    if not is_key(key):
        raise ObjectMissing(key)
    return key
