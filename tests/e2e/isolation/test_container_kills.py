"""Kills under load, with containers: each call is answered and booked once, nothing is left, pools fill again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from tests.containers.engine import DockerEngine, docker_engine
from tests.e2e.load import loaded
from tests.e2e.systems import System, running
from tests.servers import wait_until

pytestmark = pytest.mark.isolations("namespaces", why="its functions name their own isolation")

LAUNCHER = "fleetstart.runtime.launch.container"
HANDLER = """
import socket
from fleetstart.runtime import Scale, function

@function(isolation="container", memory="64MiB", concurrency=2, retries=5, scale=Scale(max=2, keep_alive_s=600))
def works():
    return socket.gethostname()
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[DockerEngine]:
    with docker_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def system(engine: DockerEngine) -> Iterator[System]:
    settings = {"FS_PROFILES": "python,python+container", "FS_CONTAINER_ENGINE": engine.address}
    # Four clients make thousands of calls while an engine starts: all rows stay in Redis, where the test counts them.
    with running(env={**settings, "FS_SEGMENT_ROWS": "100000"}) as system:
        wait_until(lambda: "python+container" in system.status().nodes[0].profiles, 60, what="a launcher of containers")
        system.deploy(HANDLER, name="works")
        system.ok("works")
        yield system


def kill_engine(system: System, engine: DockerEngine) -> None:
    engine.kill()
    engine.start()


def kill_container(system: System, engine: DockerEngine) -> None:
    engine.docker("kill", system.ok("works"))


def kill_launcher(system: System, engine: DockerEngine) -> None:
    (launcher,) = [process for process in system.processes() if LAUNCHER in process.kind]
    system.kill(launcher)


def kill_node(system: System, engine: DockerEngine) -> None:
    system.kill(system.one("node"))


@pytest.mark.parametrize("kill", [kill_container, kill_engine, kill_launcher, kill_node])
def test_a_kill_under_load_loses_nothing_and_pools_fill_again(
    system: System, engine: DockerEngine, kill: Callable[[System, DockerEngine], None]
) -> None:
    with loaded(system, "works", clients=4) as load:
        load.wait_for(20)
        before = set(engine.containers())
        kill(system, engine)
        load.wait_for(40, deadline_s=60)
    assert Counter(answer.status for answer in load.answers) == {200: len(load.answers)}

    asked = {answer.request for answer in load.answers}

    def booked() -> bool:
        rows = Counter(row.id for row in system.invocations() if row.id in asked)
        return set(rows) == asked and set(rows.values()) == {1}

    wait_until(booked, 30, what="one row for each call")
    assert system.open_invocations() == 0

    def filled() -> bool:
        waiting = engine.docker("ps", "--quiet", "--no-trunc", "--filter", "status=paused").split()
        return bool(waiting) and (kill is kill_container or not before & set(waiting))

    wait_until(filled, 60, what="a container that waits, after the kill")


def test_the_end_of_the_system_leaves_no_container(system: System, engine: DockerEngine) -> None:
    """The last test: what was killed left nothing behind that the end would miss."""
    system.down()
    wait_until(lambda: engine.containers() == [], 30, what="the removal of all containers")
