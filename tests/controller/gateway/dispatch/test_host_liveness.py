"""Host liveness: a silent worker is waited for as long as its host answers probes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fleetstart.controller.gateway.dispatch.errors import HostSilent
from fleetstart.controller.gateway.dispatch.host_liveness import HostLiveness, numeric_address, responds

WAIT_S = 20.0


@contextmanager
def listening() -> Iterator[socket.socket]:
    """Nobody accepts, and the kernel takes connections nonetheless."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        yield listener


@contextmanager
def deaf() -> Iterator[socket.socket]:
    """An address that does not answer, as if the host were gone: its backlog is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        filling = [socket.socket() for _ in range(4)]
        try:
            for one in filling:
                one.setblocking(False)
                one.connect_ex(listener.getsockname())
            yield listener
        finally:
            for one in filling:
                one.close()


def endpoint(listener: socket.socket) -> str:
    host, port = listener.getsockname()
    return f"{host}:{port}"


async def answers(where: str) -> bool:
    address = numeric_address(where)
    assert address is not None
    return await responds(address)


def test_a_host_answers_also_if_its_worker_does_not() -> None:
    with listening() as listener:
        assert asyncio.run(answers(endpoint(listener)))
        where = endpoint(listener)
    assert asyncio.run(answers(where)), "a refusal is an answer"


def test_a_host_that_is_gone_does_not_answer() -> None:
    with deaf() as listener:
        assert not asyncio.run(answers(endpoint(listener)))


@pytest.mark.parametrize(
    ("where", "family"),
    [("127.0.0.1:80", socket.AF_INET), ("[::1]:80", socket.AF_INET6), ("worker.example:80", None), ("", None)],
)
def test_only_numbers_are_asked(where: str, family: int | None) -> None:
    address = numeric_address(where)
    assert (address[0] if address is not None else None) == family


def test_a_wait_ends_when_the_host_is_gone() -> None:
    async def main(where: str) -> None:
        watch = HostLiveness(where)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(WAIT_S):
                assert await watch.wait(asyncio.sleep(0.01, "first")) == "first"
                with pytest.raises(HostSilent):
                    await watch.wait(loop.create_future())
                await asyncio.sleep(0)  # nothing is left of the cancellation
        finally:
            watch.close()
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    with deaf() as listener:
        asyncio.run(main(endpoint(listener)))


def test_a_wait_for_a_silent_worker_goes_on_and_later_ones_are_watched_again() -> None:
    """Asked a few times, less and less often; who speaks and falls silent is asked soon again."""

    async def main(listener: socket.socket) -> None:
        watch = HostLiveness(endpoint(listener))
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(WAIT_S):
                listener.setblocking(False)
                for _ in range(2):
                    waited = loop.create_future()
                    waiting = asyncio.ensure_future(_asked(listener, 2, waited))
                    assert await watch.wait(waited) == "spoke"
                    await waiting
        finally:
            watch.close()

    with listening() as listener:
        asyncio.run(main(listener))


async def _asked(listener: socket.socket, times: int, then: asyncio.Future[str]) -> None:
    """Answers only when it was asked so often."""
    loop = asyncio.get_running_loop()
    for _ in range(times):
        connection, _ = await loop.sock_accept(listener)
        connection.close()
    then.set_result("spoke")


def test_whoever_else_ends_the_wait_is_heard() -> None:
    async def main(where: str) -> None:
        watch = HostLiveness(where)
        try:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await watch.wait(asyncio.get_running_loop().create_future())
        finally:
            watch.close()

    with deaf() as listener:
        asyncio.run(main(endpoint(listener)))
