"""Functions in containers of Podman, by the same client as Docker's: what they see, how they end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.containers.podman import Podman, podman
from tests.e2e.isolation.escapes import ATTEMPTS, BOMBS, defused, deploy_escapes, try_escapes
from tests.e2e.systems import System, running
from tests.servers import wait_until

pytestmark = pytest.mark.isolations("namespaces", why="its functions name their own isolation")

HANDLER = """
import socket
from fleetstart.runtime import Scale, function


@function(isolation="container", memory="64MiB", scale=Scale(max=1, keep_alive_s=600))
def named() -> str:
    return socket.gethostname()
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[Podman]:
    with podman() as engine:
        yield engine


@pytest.fixture(scope="module")
def system(engine: Podman) -> Iterator[System]:
    settings = {"FS_PROFILES": "python,python+container", "FS_CONTAINER_ENGINE": engine.address}
    with running(env={**settings, "FS_EGRESS_ALLOW": "127.0.0.2"}) as system:
        wait_until(lambda: "python+container" in system.status().nodes[0].profiles, 60, what="a launcher of containers")
        yield system


@pytest.fixture(scope="module")
def escapes(system: System) -> str:
    """Name of a function that tries to get out."""
    return deploy_escapes(system, "container")


def test_all_attempts_to_get_out_are_refused(system: System, engine: Podman, escapes: str) -> None:
    tried = try_escapes(system, escapes, [engine.address.removeprefix("unix://")])
    assert tried == dict.fromkeys(ATTEMPTS, "refused")


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_stopped(system: System, escapes: str, bomb: str) -> None:
    assert defused(system, escapes, bomb) in BOMBS[bomb]


def test_a_container_serves_one_function_and_is_removed(system: System, engine: Podman) -> None:
    system.deploy(HANDLER, name="named")
    name = system.ok("named")
    assert name in engine.names()
    system.fs("rm", "named", "--yes")
    wait_until(lambda: name not in engine.names(), 20, what="its removal")


def test_what_a_killed_node_left_is_removed_and_nothing_stays_with_the_last(system: System, engine: Podman) -> None:
    """The last test of this file: it ends the system."""
    before = set(engine.names())
    system.kill(system.one("node"))
    wait_until(lambda: not before & set(engine.names()), 60, what="the removal of all that was before")
    system.down()
    wait_until(lambda: engine.names() == [], 20, what="the removal of all containers with their node")
