"""The daemon's client of a fork server: a warm parent of one profile, or the launcher of gVisor sandboxes.

The daemon never forks workers itself: it has threads, sockets and secrets that no worker should inherit. A fork
server that dies takes its workers with it (the kernel sees to that), is logged, and is started again with growing
pauses. What a worker runs is unknown here.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from fleetstart.runtime.contract.errors import StartFailed, Unavailable
from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.node.channel import Channel, ChannelClosed, pair
from fleetstart.runtime.contract.node.messages import (
    CheckImage,
    Exited,
    Fork,
    Forked,
    ForkFailed,
    ForkServerMessage,
    ImageChecked,
    LauncherReady,
    LauncherUnavailable,
)

from .control_groups.groups import Cgroup
from .forked_process import ForkedProcess
from .process_memory import private_bytes
from .read_budget import ReadBudget

log = logging.getLogger(__name__)
RESTART_PAUSES_S = (0.1, 0.5, 2.0, 5.0)
END_TIMEOUT_S = 2.0
_PR_SET_PDEATHSIG = 1


class ForkServer:
    """One fork server, kept alive by `run`. `module` is its program, which gets `arguments` and `--fd`."""

    def __init__(
        self,
        *,
        module: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        changed: Callable[[], None],
        on_demand: bool = False,
        reads: ReadBudget | None = None,
        advice: str = "",
        end_s: float = END_TIMEOUT_S,
    ) -> None:
        """`on_demand`: it is launched by `want`, not by `run`. `advice`: what to do where it cannot make workers.
        `reads`: the budget that it shares with the node's other servers. `end_s`: how long it may take to end, before
        it is killed; 0 for one that leaves nothing behind, whose imports need not be waited for."""
        self._advice = advice
        self._end_s = end_s
        self._reads = reads or ReadBudget()
        self.warm: LauncherReady | None = None
        self.refused = ""
        """Why it cannot make workers on this machine; empty if it can."""
        self._module = module
        self._arguments = list(arguments)
        self._env = dict(env)
        self._changed = changed
        self._channel: Channel[ForkServerMessage] | None = None
        self._popen: subprocess.Popen[bytes] | None = None
        self._processes: dict[WorkerId, ForkedProcess] = {}
        self._forking: dict[WorkerId, asyncio.Future[None]] = {}
        self._checking: dict[WorkerId, list[asyncio.Future[bool]]] = {}
        self._lost = asyncio.Event()
        self._up = asyncio.Event()
        self._wanted = asyncio.Event()
        self.own_bytes = 0
        """Memory that it took for its imports, measured when it was warm; 0 while it does not run."""
        self.last_fork_s = 0.0
        if not on_demand:
            self._wanted.set()

    def want(self) -> None:
        """Launches it, if it was made to wait for that."""
        self._wanted.set()

    def rest(self) -> None:
        """Ends it and its workers until it is wanted again."""
        self._wanted.clear()
        self._up.clear()
        self._lost.set()
        self.own_bytes = 0
        if self.warm is not None:
            self.warm = None
            self._changed()

    @property
    def workers(self) -> int:
        """Number of its workers that live, those that wait included."""
        return len(self._processes)

    async def run(self) -> None:
        """Keeps the fork server running until cancelled, while it is wanted."""
        failures = 0
        try:
            while True:
                await self._wanted.wait()
                try:
                    self._launch()
                except OSError as error:  # no descriptors, or no memory: for now
                    log.error("a fork server cannot be launched", extra={"program": self._module, "error": str(error)})
                else:
                    await self._lost.wait()
                rests = not self._wanted.is_set()
                failures = 0 if rests or self.warm is not None else failures + 1
                status = await self._stop(self._end_s or END_TIMEOUT_S)
                if rests:
                    continue
                pause_s = RESTART_PAUSES_S[min(failures, len(RESTART_PAUSES_S) - 1)]
                extra = {"program": self._module, "arguments": self._arguments, "status": status, "pause_s": pause_s}
                log.error("fork server died", extra=extra)
                await asyncio.sleep(pause_s)
        finally:
            await self._stop(self._end_s)

    async def fork(
        self,
        worker: WorkerId,
        group: Cgroup | None,
        *,
        pool: str,
        network: bool,
        folders: Mapping[str, str] | None = None,
        image: str = "",
        gpus: Sequence[str] = (),
    ) -> ForkedProcess:
        """Forks a worker, waiting for a server that is restarting. Callers set the deadline.

        Errors: StartFailed if the launcher refuses what the function asks for; Unavailable if the server dies or cannot
        fork, or this process has no descriptors left.
        """
        await self._up.wait()
        assert self._channel is not None
        self.last_fork_s = time.monotonic()
        control, its_control, log_read, log_write = _descriptors(pool)
        process = ForkedProcess(
            fork_id=worker, pool=pool, control=control, log_fd=log_read, group=group, share=self._reads.own_share()
        )
        reply: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._processes[worker] = process
        self._forking[worker] = reply
        try:
            procs = group.procs if group is not None else []
            descriptors = (its_control.fileno(), log_write)
            profile = pool.partition("+")[0]
            message = Fork(
                worker=worker,
                cgroup_procs=procs,
                network=network,
                folders=dict(folders or {}),
                profile=profile,
                image=image,
                gpus=list(gpus),
            )
            self._channel.send(message, descriptors)
            its_control.close()
            os.close(log_write)
            log_write = -1
            await reply
        except ChannelClosed as error:
            self._abandon(process)
            raise Unavailable(f"the fork server of {pool} is gone: {error}") from error
        except BaseException:
            self._abandon(process)
            raise
        finally:
            its_control.close()
            if log_write >= 0:
                os.close(log_write)
        return process

    async def is_current(self, worker: WorkerId) -> bool:
        """True if the image of a worker's container is still the one that its name means; False also if the launcher is
        gone, or cannot tell. Callers set the deadline."""
        reply: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._checking.setdefault(worker, []).append(reply)
        try:
            if self._channel is None:
                raise ChannelClosed("it does not run")
            self._channel.send(CheckImage(worker))
        except ChannelClosed:
            self._checked(worker, current=False)
        return await reply

    def _checked(self, worker: WorkerId, *, current: bool) -> None:
        for reply in self._checking.pop(worker, []):
            if not reply.done():
                reply.set_result(current)

    def _abandon(self, process: ForkedProcess) -> None:
        """Drops a process whose fork was cancelled. If it exists already, closing its socket ends it."""
        self._forking.pop(process.fork_id, None)
        process.kill()
        if not process.pid:
            self._processes.pop(process.fork_id, None)
            process.exited.set()
        process.close()

    def _launch(self) -> None:
        ours, its = pair()
        ours.setblocking(False)
        self.refused = ""
        self._lost.clear()
        argv = [sys.executable, "-m", self._module, *self._arguments, "--fd", str(its.fileno())]
        with its:
            self._popen = subprocess.Popen(
                argv,
                pass_fds=(its.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=self._env,
                preexec_fn=_death_signal(os.getpid()),
            )
        self._channel = Channel(ours, ForkServerMessage)
        asyncio.get_running_loop().add_reader(ours.fileno(), self._read)
        self._up.set()

    def _read(self) -> None:
        while self._channel is not None:
            try:
                message, descriptors = self._channel.receive()
            except BlockingIOError:
                return
            except ChannelClosed:
                asyncio.get_running_loop().remove_reader(self._channel.fileno())
                self._up.clear()
                self._lost.set()
                return
            for descriptor in descriptors:
                os.close(descriptor)
            self._handle(message)

    def _handle(self, message: ForkServerMessage) -> None:
        match message:
            case LauncherReady():
                self.warm = message
                self.last_fork_s = time.monotonic()
                self.own_bytes = private_bytes(self._popen.pid) if self._popen is not None else 0
                log.info("fork server warm", extra={"profile": message.profile, "isolation": message.isolation})
                if message.refused:
                    log.warning("workers are less isolated, as FS_ISOLATION allows", extra={"why": message.refused})
                self._changed()
            case LauncherUnavailable(reason=reason):
                self.refused = reason
                extra = {"program": self._module, "why": reason, **({"do": self._advice} if self._advice else {})}
                log.warning("fork server makes no workers", extra=extra)
                self._changed()
            case Forked(worker=worker, pid=pid, isolation=isolation):
                process, reply = self._processes.get(worker), self._forking.pop(worker, None)
                if process is not None:
                    process.forked(pid, isolation)
                if reply is not None and not reply.done():
                    reply.set_result(None)
            case ForkFailed(worker=worker, reason=reason) as failed:
                self._processes.pop(worker, None)
                reply = self._forking.pop(worker, None)
                if reply is not None and not reply.done():
                    hint = failed.hint or (self._advice if self.refused else "")
                    error = StartFailed if failed.refused else Unavailable
                    reply.set_exception(error(f"the node could not fork a worker: {reason}", hint=hint))
            case ImageChecked(worker=worker, current=current):
                self._checked(worker, current=current)
            case Exited(worker=worker, status=status):
                process = self._processes.pop(worker, None)
                if process is not None:
                    process.ended(status)

    async def _stop(self, end_s: float) -> int | None:
        """Ends the server, if it runs, and its workers with it. `end_s`: how long it may take, before it is killed."""
        was_warm, self.warm = self.warm is not None, None
        self.own_bytes = 0
        self._up.clear()
        if self._channel is not None:
            with contextlib.suppress(ValueError, OSError):
                asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._channel.close()
            self._channel = None
        status = await _wait(self._popen, end_s) if self._popen is not None else None
        for worker, process in list(self._processes.items()):
            process.kill()
            process.ended(None)
            reply = self._forking.pop(worker, None)
            if reply is not None and not reply.done():
                reply.set_exception(Unavailable(f"the fork server of {process.pool} died"))
        for worker in list(self._checking):
            self._checked(worker, current=False)
        self._processes.clear()
        self._popen = None
        if was_warm:
            self._changed()
        return status


async def _wait(popen: subprocess.Popen[bytes], end_s: float) -> int | None:
    """Exit status of the server, which ends when its socket does; SIGKILL if it does not. None if even that took too
    long."""
    for limit_s, last_resort in ((end_s, popen.kill), (max(end_s, END_TIMEOUT_S), lambda: None)):
        deadline = asyncio.get_running_loop().time() + limit_s
        while asyncio.get_running_loop().time() < deadline:
            if (status := popen.poll()) is not None:
                return status
            await asyncio.sleep(0.01)
        last_resort()
    return None


def _death_signal(parent: int) -> Callable[[], None]:
    """A preexec function: the child dies with its parent. One call into libc, loaded before the fork."""
    prctl = ctypes.CDLL(None).prctl

    def set_death_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return set_death_signal


def _descriptors(pool: str) -> tuple[socket.socket, socket.socket, int, int]:
    """The two ends of a worker's socket and of the pipe for its log. Errors: Unavailable, and none of them is left."""
    with contextlib.ExitStack() as made:
        try:
            control, its_control = (made.enter_context(each) for each in pair())
            log_read, log_write = os.pipe()
        except OSError as error:
            raise Unavailable(
                f"the node cannot make a socket and a pipe for a worker of {pool}: {error}",
                hint="raise the limit of open files of the node daemon (LimitNOFILE, ulimit -n)",
            ) from error
        made.pop_all()
    return control, its_control, log_read, log_write
