"""Tests of a node whose file descriptors are used up: it starts no worker for now, and goes on."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from typing import Any

import pytest

from fleetstart.prefetcher.processes import forkserver_client
from fleetstart.prefetcher.processes.forked_process import ForkedProcess
from fleetstart.prefetcher.processes.forkserver_client import ForkServer
from fleetstart.prefetcher.processes.prefork_pool import PreforkPool
from fleetstart.prefetcher.processes.worker_uids import WorkerUids
from fleetstart.runtime.contract.errors import Unavailable
from fleetstart.runtime.contract.node.messages import LauncherReady

SPARE = 64
"""Descriptors left to the test before it takes them all."""


@contextlib.contextmanager
def no_descriptors_but(count: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + SPARE, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("left", [0, 1, 2, 3])
def test_a_fork_without_descriptors_is_unavailable_and_leaves_none_open(left: int) -> None:
    with no_descriptors_but(left):
        with pytest.raises(Unavailable, match=r"a worker of python: .*Too many open files"):
            forkserver_client._descriptors("python")
        again = [os.open("/dev/null", os.O_RDONLY) for _ in range(left)]
    for descriptor in again:
        os.close(descriptor)


class Poor(ForkServer):
    """A fork server that is up, on a node without descriptors."""

    forks = 0

    async def fork(self, *_: Any, **__: Any) -> ForkedProcess:
        self.forks += 1
        raise OSError(errno.EMFILE, "Too many open files")


def test_a_pool_that_cannot_fork_ahead_goes_on() -> None:
    async def fill() -> None:
        server = Poor(module="none", arguments=[], env={}, changed=lambda: None)
        server.warm = LauncherReady(profile="python", isolation="")
        pool = PreforkPool(
            servers={"python": server}, cgroups=None, uids=WorkerUids(range(0)), size=1, starts_under_way=lambda: 0
        )
        filling = asyncio.create_task(pool.run())
        async with asyncio.timeout(5):
            while not server.forks:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0)
        assert not filling.done(), filling
        filling.cancel()

    asyncio.run(fill())


def test_a_fork_server_that_cannot_be_launched_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def launch() -> None:
        server = ForkServer(module="none", arguments=[], env={}, changed=lambda: None)
        tries = 0

        def fail() -> None:
            nonlocal tries
            tries += 1
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(server, "_launch", fail)
        running = asyncio.create_task(server.run())
        async with asyncio.timeout(5):
            while tries < 2:
                await asyncio.sleep(0.01)
        assert not running.done()
        running.cancel()

    asyncio.run(launch())
