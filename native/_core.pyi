"""The typed face of the compiled module. Everything that blocks or copies releases the GIL."""

from collections.abc import Sequence
from typing import Any, Literal, SupportsFloat, SupportsInt

from typing_extensions import Buffer, CapsuleType

class NativeError(Exception):
    """Base of every error of this module."""

class SegmentFailed(NativeError):
    """The segment's owner gave up filling it. args: (code, message)."""

class Region:
    """Shared memory of one segment's data: slabs, mapped one after the other.

    The owner's mapping is shared and writable. An attached mapping is private: reads see the owner's
    bytes, a write makes a copy of the page for the writer alone: of a hugetlb region, a page of the
    reserve, and the writer dies if none is left. Views and capsules keep the mapping alive after the
    Region itself is gone. When the owner's last one goes, its slabs go back to their pool: whoever has
    them attached still sees what their next user writes.
    """

    @staticmethod
    def attach(fds: Sequence[int], size_bytes: int) -> Region:
        """Maps another process's region, of which these are the slabs; OSError if who has one could write or resize it.

        Takes over the descriptors, also when it fails: they are closed either way, the mapping needs none.
        """
    @property
    def fds(self) -> list[int]:
        """The slabs, for others to attach: duplicate them, they are the region's. Empty if it is attached."""
    @property
    def size_bytes(self) -> int: ...
    def view(self, offset: int, size_bytes: int) -> memoryview:
        """Bytes `[offset, offset + size)`; writable in the owner, read-only when attached.

        IndexError if outside, and in the owner if they lie in two slabs.
        """
    def dlpack(self, offset: int, shape: Sequence[int], dtype: str) -> CapsuleType:
        """A DLPack capsule over the memory, no copy; dtype by its safetensors name. For `torch.from_dlpack`.

        8-bit floats come as U8: view the tensor as the dtype. The offset must be a multiple of the item's
        size. IndexError if outside, ValueError for a dtype, shape or offset that cannot be.
        In-place work on an attached tensor copies its pages, and those no longer follow the owner: do it
        to chunks that are ready only.
        """
    def populate(self, offset: int, size_bytes: int) -> None:
        """Maps the pages of the range in one call, instead of at first touch each.

        In the owner, allocates them: OSError if memory is short. When attached, only for chunks that are ready.
        """

def attach_across_kernels() -> None:
    """For a process whose kernel is not its owner's, as inside gVisor: what is attached from now on is not asked for
    its seals, which are not known there, and waits look once a millisecond, as no wake-up crosses. Not taken back."""

class ControlBlock:
    """State of one segment in shared memory: ready bits, state, error, the manifest, and a futex word to wait on.

    Written by the owner alone; readers map it read-only.
    """

    @staticmethod
    def create(name: str, chunk_count: int, manifest: bytes, generation: int) -> ControlBlock: ...
    @staticmethod
    def attach(fd: int) -> ControlBlock:
        """NativeError if it is not a control block of this version. Takes over the descriptor as Region does."""
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
    def mark_ready(self, chunk: int) -> bool:
        """Publishes a verified chunk and wakes waiters; the last one makes the state "ready".

        True if the chunk was not ready before: whoever brings it second is not counted.
        """
    def fail(self, code: str, message: str) -> bool:
        """Wakes every waiter with SegmentFailed; cut to 64 and 2048 bytes.

        True if this made the segment fail: the first failure stands, and a ready segment stays ready.
        """
    def wait(self, first: int, last: int, timeout_s: float) -> None:
        """Returns when chunks first..last (inclusive) are ready. SegmentFailed, TimeoutError, IndexError.

        Chunks that are ready are ready, also in a segment that failed later. A timeout of 0 asks and does
        not wait; one that is not finite is a ValueError.

        Waits on a futex without spinning; runs Python's signal handlers about once a second.
        """

class SlabPool:
    """The memory of a node's segments, in slabs of one size that are used again and again. Thread-safe."""

    def __init__(self, name: str, *, pages: Literal["hugetlb", "thp", "small"], slab_bytes: int, capacity: int) -> None:
        """`slab_bytes` is a power of two, of 2 MiB at least for huge pages; `capacity` counts slabs.

        OSError if the machine has no such pages for us, ValueError for sizes that cannot be.
        """
    def take(self, size_bytes: int) -> Region:
        """Zeroed memory; its slabs come back, dirty, with the end of its last use. OSError(ENOMEM) past the capacity.

        Clean slabs first, then dirty ones, cleared now, then new ones, whose pages come at first touch. Waits
        for those that are being prepared if it needs them.
        """
    def take_some(self, size_bytes: int, positions: Sequence[int]) -> Region:
        """The same, of which only the slabs at these positions count and may be used now; IndexError past its end.

        The others are sparse: whoever attaches the region has them too, and sees what comes once they are granted.
        """
    def grant(self, region: Region, positions: Sequence[int]) -> None:
        """Grants these slabs of the region too, at once: their pages come at first touch. None of them if it fails.

        Free slabs give way where the capacity is reached. These do not come back to the pool, but to the system.
        OSError(ENOMEM) past the capacity, IndexError past the region's end, ValueError for another pool's region.
        """
    def prepare(self, wanted: int) -> bool:
        """Clears one dirty slab, or makes a new one with its pages if fewer than `wanted` are clean. False: none to do.

        OSError if memory is short.
        """
    def release(self, count: int) -> int:
        """Gives free slabs back to the system, dirty ones first; how many."""
    @property
    def pages(self) -> Literal["hugetlb", "thp", "small"]: ...
    @property
    def slab_bytes(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def used(self) -> int: ...
    @property
    def clean(self) -> int:
        """Free, and zero everywhere."""
    @property
    def dirty(self) -> int:
        """Free, with what its last user left."""

def xxh3(data: Buffer) -> int:
    """XXH3-64 of a contiguous buffer, seed 0."""

class Checksum:
    """XXH3-64 of a buffer that fills from its beginning, taken while the caches still hold each piece."""

    def __init__(self, data: Buffer) -> None: ...
    def advance(self, ready_bytes: int) -> None:
        """The first `ready_bytes` of the buffer are there now, and stay as they are."""
    def receive(self, fd: int, begin: int, slice_s: SupportsFloat) -> int:
        """Fills the buffer from a blocking socket, from byte `begin` on; how many bytes are there then.

        Returns early once `slice_s` have passed, so that its caller can look up, or when nothing more comes. If
        nothing came at all: OSError; EOFError if the peer closed; TimeoutError after the socket's SO_RCVTIMEO.
        BufferError if the buffer is read-only.
        """
    def digest(self) -> int:
        """All are. Changes nothing: it can be asked again, also before that is so."""

def read_checksum(fd: int, file_offset: int, destination: Buffer) -> int:
    """pread of exactly len(destination) bytes, and their xxh3. OSError; EOFError says how many bytes were there."""

def read_direct(fd: int, file_offset: int, destination: Buffer, size_bytes: int) -> int:
    """The same past the page cache, for a descriptor with O_DIRECT, and exactly `size_bytes`.

    Offset, address and length of the destination are multiples of 4096; what it has past `size_bytes` is
    overwritten, with zeros at last. OSError (EINVAL where it is refused), EOFError, ValueError if it is too small.
    """

def cached_bytes(fd: int, file_offset: int, size_bytes: int) -> int:
    """How much of the range the page cache holds; 0 where the kernel cannot tell (before 6.5)."""

class Decoder:
    """Layers of a Llama model on the CPU, over weights where they lie: whatever has `__dlpack__`, held, not copied.

    The arithmetic is fp32, from weights in fp32, fp16 or bf16; a row's result does not depend on the rows
    beside it. Keys and values lie in blocks of `block_tokens`, stored as `kv_dtype` ("fp32", "fp16", "bf16").
    """

    def __init__(
        self,
        *,
        hidden_size: SupportsInt,
        head_count: SupportsInt,
        kv_head_count: SupportsInt,
        head_dim: SupportsInt,
        ffn_size: SupportsInt,
        vocab_size: SupportsInt,
        norm_eps: SupportsFloat,
        inverse_frequencies: Buffer,
        layers: Sequence[Any],
        embedding: Any,
        final_norm: Any,
        head: Any,
        kv_dtype: str,
        block_count: SupportsInt,
        block_tokens: SupportsInt,
        threads: SupportsInt,
        isa: str = "auto",
    ) -> None:
        """`layers` holds nine tensors each: attention norm, q, k, v, o, ffn norm, gate, up, down; matrices [out, in].

        `embedding`, `final_norm` and `head` are None in a stage that is not the first.
        `isa` is "auto", "avx512", "avx2" or "generic". ValueError for shapes, types and processors that do not fit.
        """
    @property
    def isa(self) -> str: ...
    def step(
        self,
        *,
        tokens: Buffer | None,
        hidden: Buffer | None,
        positions: Buffer,
        starts: Buffer,
        tables: Buffer,
        logits_rows: Buffer | None,
        output: Buffer,
    ) -> None:
        """Runs the layers over rows of several sequences, laid end to end; see `runtime.llm.batch.Batch`.

        tokens, positions [rows] int32; hidden [rows, hidden_size] fp32 instead of tokens in a later stage;
        starts [sequences + 1], tables [sequences, width] int32. With logits_rows [n] int32, output is
        [n, vocab_size] fp32; without, the hidden states [rows, hidden_size] fp32 after the last layer that is here.
        ValueError, IndexError for what would reach outside; the cache is as it was then. RuntimeError if another
        thread is in a step.
        """
    def logits(self, *, hidden: Buffer, output: Buffer) -> None:
        """Final norm and head over hidden states [n, hidden_size] fp32, to output [n, vocab_size] fp32.

        Errors as of `step`; ValueError without a head.
        """
    def read_kv(self, table: Buffer, begin: SupportsInt, end: SupportsInt) -> bytes:
        """Keys and values of tokens `begin .. end - 1` of the sequence whose blocks are `table` [n] int32.

        All layers: [layer][key, value][kv_head][token][head_dim] of kv_dtype. ValueError, IndexError for tokens
        that lie outside. May run beside a step, in another thread: what earlier steps have written no step changes.
        """
    def write_kv(
        self, table: Buffer, begin: SupportsInt, end: SupportsInt, first_layer: SupportsInt, data: Buffer
    ) -> None:
        """Puts what `read_kv` of as many layers gave, as bytes, into the layers from `first_layer` on.

        ValueError, IndexError for tokens and layers that lie outside, or data of another size; the cache is as it
        was then. May run beside a step that does not attend to these tokens.
        """
