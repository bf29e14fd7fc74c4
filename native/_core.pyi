"""Types of the compiled module. Everything that blocks or copies releases the GIL."""

from collections.abc import Sequence
from typing import Any, Literal, SupportsFloat, SupportsInt

from typing_extensions import Buffer, CapsuleType

class NativeError(Exception):
    """Base of every error of this module."""

class SegmentFailed(NativeError):
    """The fetch of the segment has failed. args: (code, message)."""

class Region:
    """Shared memory of one segment's data: slabs, mapped one after the other.

    The owner's mapping is shared and writable. An attached mapping is private: reads see the owner's
    bytes, a write makes a copy of the page for the writer alone: of a hugetlb region, a page of the
    reserve, and the writer dies if none is left. Views and capsules keep the mapping alive after the
    Region itself is gone. When the owner's last one goes, its slabs go back to their pool: a
    process that still has them attached sees what their next user writes.
    """

    @staticmethod
    def attach(fds: Sequence[int], size_bytes: int) -> Region:
        """Maps another process's region from its slabs. OSError if they are not sealed against writes and resizing.

        Closes the descriptors, also when it fails: the mapping needs none.
        """
    @property
    def fds(self) -> list[int]:
        """Descriptors of the slabs, for `attach` elsewhere. The region's own: duplicate them. Empty when attached."""
    @property
    def size_bytes(self) -> int: ...
    @property
    def reader(self) -> Region:
        """The same memory. Of an attached region it is mapped shared and read-only: such pages can be pinned as they
        are, where those of a private mapping are copied first. Of the owner it is its own, writable mapping."""
    def view(self, offset: int, size_bytes: int) -> memoryview:
        """Bytes `[offset, offset + size)`; writable in the owner, read-only when attached.

        IndexError if outside, and in the owner if they lie in two slabs.
        """
    def dlpack(self, offset: int, shape: Sequence[int], dtype: str) -> CapsuleType:
        """A DLPack capsule over the memory, no copy; dtype by its safetensors name. For `torch.from_dlpack`.

        8-bit floats come as U8: view the tensor as the dtype. The offset must be a multiple of the item's
        size. IndexError if outside, ValueError for an invalid dtype, shape or offset.
        In-place work on an attached tensor copies its pages, which no longer follow the owner: only for
        chunks that are ready.
        """
    def populate(self, offset: int, size_bytes: int) -> None:
        """Maps the pages of the range in one call, instead of at first touch each.

        In the owner, allocates them: OSError if memory is short. When attached, only for chunks that are ready.
        """

def attach_across_kernels() -> None:
    """Makes attaching work in a process under another kernel than the owner's, as inside gVisor: from now on seals are
    not checked, which are unknown there, and waits poll once a millisecond, as no futex crosses. Irreversible."""

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

        True if the chunk was not ready before.
        """
    def fail(self, code: str, message: str) -> bool:
        """Fails the segment and wakes every waiter with SegmentFailed; truncates to 64 and 2048 bytes.

        True if this made the segment fail: the first failure stands, and a ready segment stays ready.
        """
    def wait(self, first: int, last: int, timeout_s: float) -> None:
        """Returns when chunks first..last (inclusive) are ready. SegmentFailed, TimeoutError, IndexError.

        Ready chunks stay ready, also in a segment that fails later. A timeout of 0 only checks; one that is
        not finite is a ValueError.

        Waits on a futex without spinning; runs Python's signal handlers about once a second.
        """

class SlabPool:
    """The memory of a node's segments, in slabs of one size that are reused. Thread-safe."""

    def __init__(self, name: str, *, pages: Literal["hugetlb", "thp", "small"], slab_bytes: int, capacity: int) -> None:
        """`slab_bytes` is a power of two, of 2 MiB at least for huge pages; `capacity` counts slabs.

        OSError if the machine has no such pages, ValueError for invalid sizes.
        """
    def take(self, size_bytes: int) -> Region:
        """Zeroed memory; its slabs return, dirty, with its last reference. OSError(ENOMEM) beyond the capacity.

        Uses clean slabs first, then dirty ones, cleared now, then new ones, whose pages come at first touch.
        Waits for those that are being prepared if it needs them.
        """
    def take_some(self, size_bytes: int, positions: Sequence[int]) -> Region:
        """Like `take`, but only the slabs at these positions are allocated and may be used; IndexError past its end.

        The others are sparse: processes that attach the region map them too, and see their data once granted.
        """
    def grant(self, region: Region, positions: Sequence[int]) -> None:
        """Allocates more slabs of the region, all or none; their pages come at first touch.

        Releases free slabs where the capacity is reached. Granted slabs return to the system, not to the pool.
        OSError(ENOMEM) beyond the capacity, IndexError past the region's end, ValueError for another pool's region.
        """
    def prepare(self, wanted: int) -> bool:
        """Clears one dirty slab, or makes a new one with its pages if fewer than `wanted` are clean.

        False if there was nothing to do. OSError if memory is short.
        """
    def release(self, count: int) -> int:
        """Gives free slabs back to the system, dirty ones first; returns how many."""
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
        """Number of free, zeroed slabs."""
    @property
    def dirty(self) -> int:
        """Number of free slabs that hold old data."""

def xxh3(data: Buffer) -> int:
    """XXH3-64 of a contiguous buffer, seed 0."""

class Checksum:
    """XXH3-64 of a buffer that fills from its beginning, taken while the caches still hold each piece."""

    def __init__(self, data: Buffer) -> None: ...
    def advance(self, ready_bytes: int) -> None:
        """Hashes up to the first `ready_bytes` of the buffer, which must not change any more."""
    def receive(self, fd: int, begin: int, slice_s: SupportsFloat) -> int:
        """Fills the buffer from a blocking socket, from byte `begin` on; returns how many bytes it has then.

        Returns early once `slice_s` have passed, so that its caller can check, or when nothing more comes. If
        nothing came at all: OSError; EOFError if the peer closed; TimeoutError after the socket's SO_RCVTIMEO.
        BufferError if the buffer is read-only.
        """
    def digest(self) -> int:
        """The checksum of the bytes so far; may be called at any time and again."""

def read_checksum(fd: int, file_offset: int, destination: Buffer) -> int:
    """pread of exactly len(destination) bytes; returns their xxh3. OSError; EOFError with the number of bytes read."""

def read_direct(fd: int, file_offset: int, destination: Buffer, size_bytes: int) -> int:
    """Like `read_checksum` of exactly `size_bytes`, past the page cache, for a descriptor with O_DIRECT.

    Offset, address and length of the destination are multiples of 4096; its bytes beyond `size_bytes`
    become zero. OSError (EINVAL if the file system refuses), EOFError, ValueError if it is too small.
    """

def cached_bytes(fd: int, file_offset: int, size_bytes: int) -> int:
    """Bytes of the range in the page cache; 0 where the kernel cannot report it (before 6.5)."""

class Completion:
    """A read that has ended."""

    @property
    def request(self) -> int: ...
    @property
    def status(self) -> Literal["ok", "not_ready", "gone", "refused", "failed"]:
        """not_ready: the peer does not have it yet, and its wait is over. gone: the peer's segment failed. refused:
        outside of what it grants. failed: the connection has; `TcpReader.error` says why."""
    @property
    def checksum(self) -> int:
        """xxh3 of the bytes as they arrived, if ok."""

class TcpReader:
    """Reads ranges of a checkpoint from a peer, straight into a region of ours that has the same offsets.

    One thread polls at a time; the rest may be called from others meanwhile. A peer that closes, that sends what was
    not asked for, or that brings nothing for `stall_s` when it should makes the connection fail.
    """

    def __init__(self, fd: int, region: Region | None = None, stall_s: float = 10.0) -> None:
        """`fd`: a connected stream socket after the handshake. It is duplicated and made non-blocking: close it or keep
        it, but do not use it. The region is the owner's; without one, `submit_into` is to be used. OSError, ValueError.
        """
    def submit(self, request: int, offset: int, size_bytes: int, wait_s: float = 0.0) -> None:
        """Asks for a range, under a number that no outstanding request has. The peer waits up to `wait_s` for chunks of
        the range that it does not have yet, and answers what it has in the meantime.

        NativeError if the connection has failed, or with 64 outstanding; IndexError unless the range lies in one slab
        that was granted; ValueError for a size beyond 64 MiB or a wait beyond 600 s.
        """
    def submit_into(self, request: int, offset: int, into: Buffer, wait_s: float = 0.0) -> None:
        """The same, of as many bytes as the buffer has. It is held until the request has completed. BufferError if it
        is read-only or in pieces."""
    def poll(self, timeout_s: float) -> list[Completion]:
        """What has completed, as soon as something has. Empty after `timeout_s`, and at once if nothing is outstanding.
        If the connection fails, all that is outstanding completes as failed. Never raises for what a peer does.
        """
    def cancel(self) -> None:
        """Ends the connection. A poll returns at once; after it no byte is written into the region any more."""
    def release(self) -> None:
        """Leaves the connection to who uses it next: the socket is as it was given. This reads no more.
        NativeError if the connection has failed, or something is outstanding."""
    @property
    def error(self) -> str | None:
        """Why the connection failed, or that it was cancelled."""

class TcpServer:
    """Serves ranges of a segment to the reader of one connection: what is ready at once, and the rest when it is."""

    def __init__(
        self,
        fd: int,
        region: Region,
        control: ControlBlock,
        chunk_bytes: int,
        allowed: Sequence[tuple[int, int]],
        stall_s: float = 10.0,
    ) -> None:
        """`fd` as for `TcpReader`, after the reader has proved its grant. `allowed`: (begin, end) of the chunks that it
        may read. Holds the region's memory for as long as it lives. OSError, ValueError.
        """
    def run(self, until_unix_ms: int, idle_s: float = 1e6) -> str:
        """Serves until the reader closes ("closed"), the grant ends ("expired") or `stop` ("stopped"), and then closes
        the connection; or until the reader leaves it to its next handshake ("left"), or has received all and asked for
        nothing for `idle_s` ("idle"), which another server may go on from. Once only. NativeError for what no reader
        sends, TimeoutError for one that takes nothing for `stall_s`.
        """
    def stop(self) -> None: ...
    @property
    def sent_bytes(self) -> int:
        """Bytes of chunks so far."""

class Decoder:
    """Layers of a model on the CPU. Weights are objects with `__dlpack__`, referenced and not copied.

    The arithmetic is fp32, from weights in fp32, fp16, bf16 or int8; a row's result does not depend on the rows
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
        inverse_frequencies: Sequence[Any],
        rotary_factors: Sequence[SupportsFloat],
        layers: Sequence[Any],
        windows: Sequence[SupportsInt],
        turns: Sequence[SupportsInt],
        embedding: Any,
        final_norm: Any,
        head: Any,
        attention_scale: SupportsFloat,
        attention_softcap: SupportsFloat,
        embedding_scale: SupportsFloat,
        residual_scale: SupportsFloat,
        gelu: bool,
        kv_dtype: str,
        block_count: SupportsInt,
        block_tokens: SupportsInt,
        threads: SupportsInt,
        isa: str = "auto",
    ) -> None:
        """`layers` holds the tensors of `runtime.llm.model.layers.LayerWeights` each, in its order; matrices are
        [out, in], those in int8 tuples with the factors of their rows, [out] in fp32, and what a model lacks is None.

        `windows` has for each layer how many tokens a token sees, 0 for all before it; `turns` which of two sets of
        `inverse_frequencies` (buffers) and `rotary_factors` it uses. A softcap of 0 is none. `gelu`: instead of silu.
        `embedding`, `final_norm` and `head` are None in a stage that is not the first.
        `isa` is "auto", "avx512", "avx2" or "generic", which compute in fp32; "amx", which rounds the factors of matrix
        products, and of attention over keys and values in bf16, to bf16; or "bf16", "amx" where the processor has it,
        else "auto". ValueError for unsupported shapes, types and processors.
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
        """Runs the layers over the rows of several sequences, concatenated; see `runtime.llm.engine.runner.Batch`.

        tokens, positions [rows] int32; hidden [rows, hidden_size] fp32 instead of tokens in a later stage;
        starts [sequences + 1], tables [sequences, width] int32. With logits_rows [n] int32, output is
        [n, vocab_size] fp32; without, the hidden states [rows, hidden_size] fp32 after the last layer of this stage.
        ValueError, IndexError for indices out of range; the cache is unchanged then. RuntimeError if another
        thread is in a step.
        """
    def logits(self, *, hidden: Buffer, output: Buffer) -> None:
        """Final norm and head over hidden states [n, hidden_size] fp32, to output [n, vocab_size] fp32.

        Errors as of `step`; ValueError without a head.
        """
    def read_kv(self, table: Buffer, begin: SupportsInt, end: SupportsInt) -> bytes:
        """Keys and values of tokens `begin .. end - 1` of the sequence whose blocks are `table` [n] int32.

        All layers: [layer][key, value][kv_head][token][head_dim] of kv_dtype. ValueError, IndexError for tokens
        that lie outside. May run beside a step, in another thread: steps do not change what earlier ones wrote.
        """
    def write_kv(
        self, table: Buffer, begin: SupportsInt, end: SupportsInt, first_layer: SupportsInt, data: Buffer
    ) -> None:
        """Writes the bytes of a `read_kv` into the layers from `first_layer` on, as many as it holds.

        ValueError, IndexError for tokens and layers that lie outside, or data of another size; the cache is
        unchanged then. May run beside a step that does not attend to these tokens.
        """
