"""The typed face of the compiled module. Everything that blocks or copies releases the GIL."""

from collections.abc import Sequence
from types import CapsuleType
from typing import SupportsInt

from typing_extensions import Buffer

class NativeError(Exception):
    """Base of every error of this module."""

class SegmentFailed(NativeError):
    """The segment's owner gave up filling it. args: (code, message)."""

class Region:
    """Shared memory of one segment's data: a sealed memfd and its mapping.

    The owner's mapping is shared and writable. An attached mapping is private: reads see the owner's
    bytes, a write makes a copy of the page for the writer alone. Views and capsules keep the mapping
    alive after the Region itself is gone.
    """

    @staticmethod
    def create(name: str, size_bytes: int) -> Region:
        """New zeroed memory; OSError (ENOMEM, EINVAL). The descriptor refuses resizing and, to others, shared writing."""
    @staticmethod
    def attach(fd: int) -> Region:
        """Maps another process's region, taking over the descriptor; OSError if it is not a sealed memfd."""
    @property
    def fd(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    def view(self, offset: int, size_bytes: int) -> memoryview:
        """Bytes `[offset, offset + size)`; writable in the owner, read-only when attached. IndexError if outside."""
    def dlpack(self, offset: int, shape: Sequence[int], dtype: str) -> CapsuleType:
        """A DLPack capsule over the memory, no copy; dtype by its safetensors name. For `torch.from_dlpack`."""

class ControlBlock:
    """State of one segment in shared memory: ready bits, state, error, the manifest, and a futex word to wait on.

    Written by the owner alone; readers map it read-only.
    """

    @staticmethod
    def create(name: str, chunk_count: int, manifest: bytes, generation: int) -> ControlBlock: ...
    @staticmethod
    def attach(fd: int) -> ControlBlock:
        """Takes over the descriptor; NativeError if it is not a control block of this version."""
    @property
    def fd(self) -> int: ...
    @property
    def manifest(self) -> bytes: ...
    @property
    def generation(self) -> int: ...
    @property
    def chunk_count(self) -> int: ...
    @property
    def ready_count(self) -> int: ...
    @property
    def state(self) -> str:
        """ "filling", "ready" (all chunks) or "failed"."""
    @property
    def error(self) -> tuple[str, str] | None:
        """(code, message) if failed."""
    def is_ready(self, chunk: int) -> bool: ...
    def mark_ready(self, chunk: int) -> None:
        """Publishes a verified chunk and wakes waiters; the last one makes the state "ready"."""
    def fail(self, code: str, message: str) -> None:
        """Wakes every waiter with SegmentFailed. Final."""
    def wait(self, first: int, last: int, timeout_s: float) -> None:
        """Returns when chunks first..last (inclusive) are ready. SegmentFailed, TimeoutError, IndexError.

        Waits on a futex without spinning; runs Python's signal handlers about once a second.
        """

def xxh64(data: Buffer, seed: SupportsInt = 0) -> int:
    """XXH64 of a contiguous buffer."""

def copy_checksum(destination: Buffer, source: Buffer) -> int:
    """Copies source over the start of destination and returns its xxh64, in one pass over the memory."""

def read_checksum(fd: int, file_offset: int, destination: Buffer) -> int:
    """pread of exactly len(destination) bytes, and their xxh64. OSError; EOFError says how many bytes were there."""
