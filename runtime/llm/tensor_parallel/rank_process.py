"""Processes of the ranks of a split model: forked from the worker, fed with steps, ended with it.

The worker is the first rank: it serves and samples. Its children are the others. They are forked before the worker has
any thread, with its confinement, its limits and its descriptors of the segment. The group ends as one: the worker,
which is process 1 of its pid namespace, takes its children with it (and they ask the kernel for a signal at its death,
where there are no namespaces); and it ends itself when a child does, so that its node replaces it and its calls run
again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NoReturn

import msgspec

from ...contract.decoding import UNDECODABLE
from ...contract.errors import ErrorInfo, FleetError, StartFailed, error_from
from ...contract.node.messages import DeviceBinding
from ...isolation import linux
from ..engine.runner import Batch
from ..model.shard import Shard

END_SEEN_S = 1.0
"""Wait for the end of another rank's process, whose sockets the kernel closes before it can be waited for."""


class Loaded(msgspec.Struct, frozen=True, tag="loaded", kw_only=True):
    """A rank has its weights, and waits for steps."""

    weight_bytes: int
    """Bytes of the weights that it reads, as they are stored."""


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed", kw_only=True):
    """A rank could not load; it waits for its end."""

    error: ErrorInfo


RankMessage = Loaded | LoadFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """One rank's place in its group, in its own process."""

    shard: Shard
    meeting: str
    """File in which the ranks meet."""
    binding: DeviceBinding
    connection: Connection
    """To the first rank: steps come, `RankMessage` go."""


class RankProcesses:
    """The other ranks of a group, from the process of the first one."""

    def __init__(
        self,
        count: int,
        binding: DeviceBinding,
        become_rank: Callable[[RankPlace], NoReturn],
        on_lost: Callable[[str], NoReturn],
        *,
        kept: Sequence[int],
    ) -> None:
        """Forks them; the caller has no other thread. `become_rank` runs in each, with the descriptors in `kept` alone
        beside the standard ones. `on_lost` ends this process; it is called with the reason, in any thread."""
        self.shard = Shard(0, count)
        self.binding = binding
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        self.meeting = os.path.join(self._folder, "meeting")
        self._on_lost = on_lost
        self._pids: dict[int, int] = {}
        self._connections: list[Connection] = []
        self._first_end: Future[str] = Future()
        """Reason of the group's end: the rank that ended first, and how."""
        for rank in range(1, count):
            self._fork(rank, become_rank, kept)
        bind_cores(binding, 0)
        for rank, pid in self._pids.items():
            threading.Thread(target=self._watch, args=(rank, pid), name=f"rank-{rank}", daemon=True).start()

    def _fork(self, rank: int, become_rank: Callable[[RankPlace], NoReturn], kept: Sequence[int]) -> None:
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if pid:
            theirs.close()
            self._pids[rank] = pid
            self._connections.append(Connection(ours.detach()))
            return
        try:
            linux.die_with_parent(signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)  # the first rank ended before the kernel knew
            descriptor = theirs.detach()
            close_all_but({0, 1, 2, descriptor, *kept})
            bind_cores(self.binding, rank)
            become_rank(
                RankPlace(
                    shard=Shard(rank, self.shard.count),
                    meeting=self.meeting,
                    binding=self.binding,
                    connection=Connection(descriptor),
                )
            )
        except BaseException as error:
            os.write(2, f"rank {rank} of the model ends: {type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(1)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(self._pids.values())

    def wait_loaded(self) -> tuple[int, ...]:
        """Waits until every rank has loaded; returns the bytes of weights that each reads. Errors: the first rank's
        that failed."""
        sizes = []
        for rank, connection in enumerate(self._connections, 1):
            try:
                said = msgspec.msgpack.decode(connection.recv_bytes(), type=RankMessage)
            except (OSError, EOFError, *UNDECODABLE) as error:
                raise StartFailed(f"rank {rank} of {self.shard.count} ended while it loaded its part") from error
            if isinstance(said, LoadFailed):
                raise error_from(said.error)
            sizes.append(said.weight_bytes)
        return tuple(sizes)

    def met(self) -> None:
        """Removes what the ranks needed to meet, once they have or cannot any more."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def send(self, batch: Batch) -> None:
        """Starts a step in every rank. Errors: OSError if one is gone."""
        data = msgspec.msgpack.encode(batch)
        for connection in self._connections:
            connection.send_bytes(data)

    def lost(self, reason: str) -> NoReturn:
        """Ends this process. The reason is a rank that has ended, if one has: a step that failed, failed for its
        sake."""
        with contextlib.suppress(TimeoutError):
            reason = self._first_end.result(END_SEEN_S)
        self._on_lost(f"the model's group of {self.shard.count} ranks is lost: {reason}")

    def _watch(self, rank: int, pid: int) -> None:
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        with contextlib.suppress(InvalidStateError):  # another one has ended before
            self._first_end.set_result(f"rank {rank} {how}")
        self.lost(f"rank {rank} {how}")


def serve_steps(place: RankPlace, load: Callable[[], tuple[int, Callable[[Batch], None]]]) -> NoReturn:
    """Loads this rank and computes steps until the first rank is gone; never returns.

    `load` returns the bytes of weights that the rank reads, and what computes a step.
    """
    try:
        weight_bytes, step = load()
    except Exception as error:
        known = error if isinstance(error, FleetError) else StartFailed(f"{type(error).__name__}: {error}")
        _say(place, LoadFailed(error=known.info()))
        with contextlib.suppress(EOFError, OSError):
            place.connection.recv_bytes()  # the first rank reports it, and ends the group
        os._exit(1)
    _say(place, Loaded(weight_bytes=weight_bytes))
    while True:
        try:
            data = place.connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        step(msgspec.msgpack.decode(data, type=Batch))


def _say(place: RankPlace, message: RankMessage) -> None:
    place.connection.send_bytes(msgspec.msgpack.encode(message))


def bind_cores(binding: DeviceBinding, rank: int) -> None:
    """Binds this process to the cores of its rank's device, if that is a CPU device."""
    cores = binding.cores_of[rank] if rank < len(binding.cores_of) else ()
    if cores:
        with contextlib.suppress(OSError):  # a core that was taken offline
            os.sched_setaffinity(0, cores)


def close_all_but(kept: set[int]) -> None:
    """Closes this process' other descriptors: those of a child would keep connections of its parent open."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(int(name))
