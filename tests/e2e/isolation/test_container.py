"""Functions in containers of a real engine: what they see, that they are served as all others, how they end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.systems import System, running
from tests.engine import DockerEngine, docker_engine
from tests.servers import wait_until

POOLS = "python,torch,python+container,torch+container"
HEAD = """
import os, platform, socket, time
from fleetstart.runtime import Scale, function

"""
ONE = 'isolation="container", memory="64MiB", concurrency=4, scale=Scale(max=1, keep_alive_s=600)'


@pytest.fixture(scope="module")
def engine() -> Iterator[DockerEngine]:
    with docker_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def system(engine: DockerEngine) -> Iterator[System]:
    """System that is up, with workers in containers."""
    with running(env={"FS_PROFILES": POOLS, "FS_CONTAINER_ENGINE": engine.address}) as system:
        wait_until(lambda: "torch" in system.status().nodes[0].profiles, 60, what="a warm fork server")
        wait_until(lambda: "python+container" in system.status().nodes[0].profiles, 30, what="a launcher of containers")
        yield system


HELLO = """
@function(ONE)
def hello(name: str = "world") -> str:
    return f"Hello, {name}!"
"""


def test_it_answers(system: System) -> None:
    system.deploy(HEAD + HELLO.replace("ONE", ONE), name="hello")
    assert system.ok("hello", {"name": "you"}) == "Hello, you!"
    (worker,) = system.info("hello").workers
    assert worker.isolation == "container,net"
