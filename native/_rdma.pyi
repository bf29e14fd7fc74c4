"""Types of the compiled module for RDMA, which is built where the headers of libibverbs are, and loads where it is
installed. Everything that blocks or registers releases the GIL."""

from collections.abc import Sequence

from fleetstart.native._core import Completion, ControlBlock, Region

class RdmaDevice:
    """A network card that reads and is read by RDMA, by one of its ports."""

    def __init__(self, name: str, port: int = 1) -> None:
        """OSError if there is no such device, or it has no address that reads could go to."""
    @property
    def name(self) -> str: ...
    @property
    def active(self) -> bool: ...
    @property
    def link(self) -> str:
        """ethernet or infiniband."""
    @property
    def mtu_bytes(self) -> int: ...
    @property
    def has_windows(self) -> bool:
        """Whether it has memory windows: each slab of a pool is then registered once, for as long as it lives."""
    @property
    def registered_bytes(self) -> int:
        """Memory that is registered with it now."""

class RdmaMemory:
    """Memory of one region, registered with a device: whoever is connected to it reads this region and nothing else, by
    memory windows that each connection has for itself, or where the device has none, by a protection domain of its own.
    Its pages stay in memory as long as it lives, and with windows as long as its slabs do; readers and servers keep it.
    """

    def __init__(self, device: RdmaDevice) -> None: ...
    def add(self, region: Region, offset: int, size_bytes: int) -> None:
        """Registers a range in one slab, after those that are registered, unless the slab is. Keeps the memory.

        OSError; ValueError unless the region is its owner's, and for a range that is registered already; IndexError
        if it is outside, or in two slabs.
        """

class RdmaReader:
    """Reads ranges of a region from its holder by RDMA READ, into the same ranges of memory that is registered here.

    The side channel is a stream socket over which the holder says what is ready, and both notice each other's end.
    All but `poll` may be called from any thread.
    """

    def __init__(
        self,
        fd: int,
        memory: RdmaMemory,
        *,
        connect_s: float = 5.0,
        silence_s: float = 0.8,
        stall_s: float = 10.0,
        packet_timeout: int = 19,
    ) -> None:
        """Connects. `fd`: a connected socket whose peer knows who we are. It is duplicated and made non-blocking:
        close it or keep it, but do not use it. `silence_s`: without a word from the holder for that long, it
        counts as gone. `stall_s`: the longest time without progress of what flows. `packet_timeout`: see
        ibv_modify_qp.

        NativeError if the holder does not connect, OSError, ValueError.
        """
    def submit(self, request: int, offset: int, size_bytes: int, wait_s: float = 0.0) -> None:
        """Asks for a range, under a number that no outstanding request has. It is read once the holder has it, which
        may take `wait_s`.

        NativeError if the connection has failed, IndexError unless the range lies in one registered part here,
        ValueError.
        """
    def poll(self, timeout_s: float) -> list[Completion]:
        """What has completed, as soon as something has. Empty after `timeout_s`, and at once if nothing is
        outstanding. If the connection fails, all that is outstanding completes as failed, when nothing is written
        any more."""
    def cancel(self) -> None:
        """Ends the connection; what is outstanding fails."""
    @property
    def error(self) -> str | None:
        """Why the connection failed, or that it was cancelled."""

class RdmaServer:
    """Lets one reader read a region's memory, and says which chunks of it are ready."""

    def __init__(
        self,
        fd: int,
        memory: RdmaMemory,
        control: ControlBlock,
        chunk_bytes: int,
        allowed: Sequence[tuple[int, int]],
        *,
        connect_s: float = 5.0,
        silence_s: float = 0.8,
        packet_timeout: int = 19,
    ) -> None:
        """`fd`: a connected socket whose reader has shown its grant; see `RdmaReader`. `allowed`: ranges (begin, end)
        of chunks that are called ready to it. OSError, ValueError."""
    def run(self, until_unix_ms: int) -> str:
        """Connects and serves until the reader closes, the grant ends, or `stop`: "closed", "expired" or "stopped".
        Once only; when it ends nobody reads the memory by this connection any more. NativeError for a reader that
        is silent or off the protocol."""
    def stop(self) -> None:
        """From any thread, also before `run`."""
    @property
    def ready_bytes(self) -> int:
        """Bytes of the ranges that were called ready to the reader, which reads them without asking anybody."""

def device_names() -> list[str]:
    """The machine's devices; empty where its kernel has no RDMA."""
