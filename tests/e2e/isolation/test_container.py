"""Functions in containers of a real engine: what they see, that they are served as all others, how they end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.containers.engine import DockerEngine, docker_engine
from tests.e2e.checkpoints import write_safetensors
from tests.e2e.isolation.consumption import assert_consumption_is_metered, assert_processors_are_limited
from tests.e2e.isolation.escapes import (
    ATTEMPTS,
    BOMBS,
    defused,
    deploy_escapes,
    heard_outside,
    reaches_the_node,
    try_escapes,
)
from tests.e2e.isolation.hostile import BUNDLES, LAYERS, assert_a_bundle_is_refused, assert_a_layer_is_refused
from tests.e2e.systems import System, error_in, running
from tests.servers import wait_until

pytestmark = pytest.mark.isolations("namespaces", why="its functions name their own isolation")

POOLS = "python,python+container,torch+container"
HEAD = """
import os, socket, time
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
    settings = {
        "FS_PROFILES": POOLS,
        "FS_CONTAINER_ENGINE": engine.address,
        "FS_EGRESS_ALLOW": "127.0.0.2",
        "FS_CPU_LIMIT": "1",
    }
    with running(env=settings) as system:
        wait_until(lambda: "python+container" in system.status().nodes[0].profiles, 60, what="a launcher of containers")
        yield system


MISBEHAVES = """
@function(ONE)
def NAME(how: str = ""):
    if how == "exits":
        os._exit(7)
    if how == "faults":
        import ctypes
        ctypes.string_at(0)
    kept = []
    while how == "eats":
        kept.append(bytearray(os.urandom(1 << 20)))
    return socket.gethostname() if how == "name" else "well"
"""


def deploy(system: System, name: str) -> str:
    system.deploy(HEAD + MISBEHAVES.replace("ONE", ONE).replace("NAME", name), name=name)
    return name


def test_it_answers_from_a_container(system: System, engine: DockerEngine) -> None:
    name = deploy(system, "hello")
    host = system.ok(name, {"how": "name"})
    assert host in engine.docker("ps", "--format", "{{.Names}}").split()
    assert system.info(name).workers[0].isolation == "container,net"
    assert "besides: container" in system.fs("nodes").out


# ── out of a container ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def escapes(system: System) -> str:
    """Name of a function that tries to get out."""
    return deploy_escapes(system, "container")


@pytest.fixture(scope="module")
def tried(system: System, engine: DockerEngine, escapes: str) -> dict[str, Any]:
    return try_escapes(system, escapes, [engine.address.removeprefix("unix://")])


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_an_attempt_to_get_out_is_refused(tried: dict[str, Any], attempt: str) -> None:
    assert tried[attempt] == "refused"


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_harms_its_own_worker_alone(system: System, escapes: str, bomb: str) -> None:
    assert defused(system, escapes, bomb) in BOMBS[bomb]
    assert system.ok("hello") == "well"


def test_a_port_of_a_worker_is_not_open_on_the_machine(system: System, escapes: str) -> None:
    assert not heard_outside(system, escapes)


def test_the_socket_of_a_worker_reaches_nothing_on_the_machine(system: System) -> None:
    assert not reaches_the_node(system, "container")


@pytest.mark.parametrize("kind", BUNDLES)
def test_a_hostile_bundle_is_refused(system: System, kind: str) -> None:
    assert_a_bundle_is_refused(system, "container", kind)


@pytest.mark.parametrize("path", LAYERS)
def test_a_hostile_layer_is_refused(system: System, path: str) -> None:
    assert_a_layer_is_refused(system, "container", path)


def test_what_it_used_is_in_its_rows(system: System) -> None:
    assert_consumption_is_metered(system, "container")


def test_its_processes_together_get_the_processors_that_a_worker_may_have(system: System) -> None:
    assert_processors_are_limited(system, "container", 1.0)


# ── weights ────────────────────────────────────────────────────────────────────────────────────────

WEIGHTS = """
import torch

@function(name="holds", weights="./weights", isolation="container", memory="512MiB", scale=Scale(max=1))
class Holds:
    def load(self, weights):
        self.weights = weights
        self.total = sum(float(tensor.double().sum()) for tensor in weights.values())

    def __call__(self):
        address = next(iter(self.weights.values())).data_ptr()
        return {"total": self.total, "lies_in": self.mapping(address), "broken_in": self.broken_in()}

    def mapping(self, address):
        for line in open("/proc/self/maps"):
            first, last = (int(number, 16) for number in line.split()[0].split("-"))
            if first <= address < last:
                return line.split(maxsplit=5)[-1].strip()

    def broken_in(self):
        done = []
        for number in os.listdir("/proc/self/fd"):
            try:
                if "fleetstart" not in os.readlink("/proc/self/fd/" + number):
                    continue
                if os.fstat(int(number)).st_size == 4096:  # the page in which the worker notes its calls
                    continue
                again = os.open("/proc/self/fd/" + number, os.O_RDWR)
            except OSError:
                done.append("refused")
                continue
            for write in (lambda: os.pwrite(again, b"x", 0), lambda: os.ftruncate(again, 0)):
                try:
                    done.append(write())
                except OSError:
                    done.append("refused")
        return done
"""
TENSORS, TENSOR_BYTES = 8, 1 << 20


def test_weights_are_the_nodes_own_memory_and_cannot_be_changed(system: System) -> None:
    handler = system.source(HEAD + WEIGHTS, folder="holds")
    write_safetensors(handler.parent / "weights" / "model.safetensors", tensors=TENSORS, tensor_bytes=TENSOR_BYTES)
    system.deploy_file(handler, "--no-probe")
    response = system.call("holds", timeout_s=120)
    assert response.headers["fs-start"] == "cold"
    seen = response.json()
    assert seen["total"] == sum(range(TENSORS)) * (TENSOR_BYTES // 4)
    assert "fleetstart" in seen["lies_in"], "no copy"
    assert set(seen["broken_in"]) == {"refused"}


# ── ends ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("how", "status", "code", "words"),
    [
        ("exits", 502, "worker_lost", "exit code 7"),
        ("faults", 502, "worker_lost", "SIGSEGV"),
        ("eats", 500, "out_of_memory", "64 MiB"),
    ],
)
def test_its_end_is_told_as_any_others_is(system: System, how: str, status: int, code: str, words: str) -> None:
    response = system.call("hello", {"how": how}, timeout_s=60)
    error = error_in(response)
    assert (response.status_code, error.code) == (status, code)
    assert words in error.message
    assert system.ok("hello") == "well"


def test_a_container_that_its_operator_removes_is_replaced(system: System, engine: DockerEngine) -> None:
    name = system.ok("hello", {"how": "name"})
    engine.docker("rm", "--force", name)
    assert system.ok("hello", {"how": "name"}) != name


def test_a_container_serves_one_function_and_is_removed(system: System, engine: DockerEngine) -> None:
    name = system.ok("hello", {"how": "name"})
    system.fs("rm", "hello", "--yes")
    wait_until(lambda: name not in engine.docker("ps", "-a", "--format", "{{.Names}}").split(), 20, what="its removal")
    deploy(system, "hello")
    assert system.ok("hello", {"how": "name"}) != name


def test_what_a_killed_engine_took_is_replaced_when_it_is_back(system: System, engine: DockerEngine) -> None:
    """One that was created and not started is good with the new engine, too."""
    system.ok("hello")
    running = set(engine.docker("ps", "--quiet", "--no-trunc").split())
    engine.kill()
    engine.start()

    def answers() -> bool:
        return system.call("hello", {"how": "name"}).status_code == 200

    wait_until(answers, 30, what="an answer with the new engine")
    wait_until(lambda: not running & set(engine.containers()), 20, what="the removal of what ran before")
    wait_until(lambda: len(engine.docker("ps", "--quiet").split()) >= 2, 20, what="pools that are filled again")


def test_what_a_killed_node_left_is_removed_by_the_next(system: System, engine: DockerEngine) -> None:
    """The last test: the next node makes all waiting workers anew. The killed one's launcher removes what it made."""
    before = set(engine.containers())
    system.kill(system.one("node"))
    wait_until(lambda: not before & set(engine.containers()), 60, what="the removal of all that was before")
    assert system.ok("hello") == "well"
    system.down()
    wait_until(lambda: engine.containers() == [], 20, what="the removal of all containers with their node")
