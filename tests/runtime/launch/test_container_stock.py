"""The stock of containers: what cannot be made or removed is tried again later, and holds up nothing else."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetstart.runtime.launch.container_engine import ContainerEngine, EngineError, UserImage
from fleetstart.runtime.launch.container_worker import WARM
from fleetstart.runtime.launch.containers import (
    GENERIC,
    Container,
    ContainerFactory,
    ContainerKind,
    ContainerRequest,
    ContainerStock,
)
from tests.servers import wait_until

LOST = UserImage("sha256:lost", "amd64", ())


class Engine(ContainerEngine):
    """An engine that pauses nothing, and says what it was to pause."""

    def __init__(self) -> None:
        super().__init__("unix:///none")
        self.paused: list[str] = []

    def pause(self, container: str) -> None:
        self.paused.append(container)

    def unpause(self, container: str) -> None:
        pass


class Factory(ContainerFactory):
    """A factory of containers without processes. None is made of the image LOST, and some cannot be removed."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        kind = ContainerKind(
            node="n", image="i", shown=(), environment={}, python="python", folder=folder, users=range(0)
        )
        super().__init__(engine, kind)
        self.tries = 0
        self.made: list[Container] = []
        self.stuck: set[str] = set()
        self.removed: list[str] = []

    def create(self, request: ContainerRequest = GENERIC) -> Container:
        if request.image == LOST:
            self.tries += 1
            raise EngineError("no such image")
        name = f"c-{len(self.made) + 1}"
        self.made.append(Container(name, name, 0, self._kind.folder / name, socket.socket()))
        return self.made[-1]

    def start(self, container: Container, profile: str) -> None:
        container.pidfd = os.pidfd_open(os.getpid())
        container.connection, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            its.send(WARM)

    def remove(self, container: Container) -> None:
        if container.id in self.stuck:
            raise EngineError("device or resource busy")
        container.close()
        self.removed.append(container.id)

    def remove_all(self) -> None:
        for container in self.made:
            container.close()


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def factory(engine: Engine, tmp_path: Path) -> Factory:
    return Factory(engine, tmp_path / "own")


@contextlib.contextmanager
def refilled(stock: ContainerStock) -> Iterator[None]:
    thread = threading.Thread(target=stock.run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stock.end(thread)


def test_an_image_that_no_container_can_be_made_of_leaves_no_other_pool_empty(engine: Engine, factory: Factory) -> None:
    stock = ContainerStock(factory)
    with pytest.raises(EngineError, match="no such image"):
        stock.take("python", LOST)
    for profile in ("python", "torch"):
        stock.take(profile)
    with refilled(stock):
        wait_until(lambda: len(engine.paused) == 2, 10, what="a paused container of each of the two other pools")
        assert 2 <= factory.tries < 5, "at the start, ahead of the next one, and only after pauses again"


def test_a_container_that_cannot_be_removed_holds_up_no_removal_and_no_pool(engine: Engine, factory: Factory) -> None:
    stock = ContainerStock(factory)
    stuck, other = (stock.take("python") for _ in range(2))
    factory.stuck.add(stuck.id)
    stock.discard(stuck)
    stock.discard(other)
    with refilled(stock):
        wait_until(lambda: factory.removed == [other.id], 10, what="the removal of the other one")
        wait_until(lambda: len(engine.paused) == 2, 10, what="a pool as before")
