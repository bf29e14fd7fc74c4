"""Functions inside gVisor that attack, crash or are killed: what is refused to them, and how they end."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.isolation.escapes import (
    ATTEMPTS,
    BOMBS,
    defused,
    deploy_escapes,
    heard_outside,
    reaches_the_node,
    try_escapes,
)
from tests.e2e.isolation.gvisor import HEAD, ONE, gvisor_system
from tests.e2e.isolation.hostile import BUNDLES, LAYERS, assert_a_bundle_is_refused, assert_a_layer_is_refused
from tests.e2e.systems import System, error_in
from tests.servers import wait_until

pytestmark = pytest.mark.isolations("namespaces", why="its functions name their own isolation")

OWN = {"make namespaces"}
"""Attempts that gVisor's kernel grants, of itself alone."""


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with gvisor_system() as system:
        yield system


def sandboxes(system: System) -> dict[int, list[str]]:
    """Processes that runsc runs for this system: pids and command lines."""
    found = {}
    for process in system.processes():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode().split("\0")
            if Path(words[0]).name.startswith("runsc"):
                found[process.pid] = words
    return found


MISBEHAVES = """
@function(ONE)
def misbehaves(how: str = ""):
    if how == "exits":
        os._exit(7)
    if how == "faults":
        import ctypes
        ctypes.string_at(0)
    kept = []
    while how == "eats":
        kept.append(bytearray(os.urandom(1 << 20)))
    if how == "prints":
        assert os.get_blocking(1) and os.get_blocking(2)
        for number in range(3000):
            print(number, "x" * 3000)
    return socket.gethostname() if how == "name" else "well"
"""


@pytest.mark.parametrize(
    ("how", "status", "code", "words"),
    [
        ("exits", 502, "worker_lost", "exit code 7"),
        ("faults", 502, "worker_lost", "SIGSEGV"),
        ("eats", 500, "out_of_memory", "64 MiB"),
    ],
)
def test_its_end_is_told_as_any_others_is(system: System, how: str, status: int, code: str, words: str) -> None:
    system.deploy(HEAD + MISBEHAVES.replace("ONE", ONE), name="misbehaves")
    assert system.ok("misbehaves") == "well"
    response = system.call("misbehaves", {"how": how}, timeout_s=60)
    error = error_in(response)
    assert (response.status_code, error.code) == (status, code)
    assert words in error.message
    assert response.headers["fs-attempts"] == "1", "it had begun the call"
    assert system.ok("misbehaves", timeout_s=60) == "well"


@pytest.fixture(scope="module")
def escapes(system: System) -> str:
    """Name of a function that tries to get out."""
    system.deploy(HEAD + MISBEHAVES.replace("ONE", ONE), name="misbehaves")
    return deploy_escapes(system, "gvisor")


@pytest.fixture(scope="module")
def tried(system: System, escapes: str) -> dict[str, Any]:
    return try_escapes(system, escapes)


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_an_attempt_to_get_out_is_refused(tried: dict[str, Any], attempt: str) -> None:
    assert tried[attempt] == "refused" or attempt in OWN, tried[attempt]


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_harms_its_own_worker_alone(system: System, escapes: str, bomb: str) -> None:
    assert defused(system, escapes, bomb) in ("stopped", "out_of_memory", "worker_lost")
    assert system.ok("misbehaves") == "well"


def test_a_port_of_a_worker_is_not_open_on_the_machine(system: System, escapes: str) -> None:
    assert not heard_outside(system, escapes)


def test_the_socket_of_a_worker_reaches_nothing_on_the_machine(system: System) -> None:
    assert not reaches_the_node(system, "gvisor")


@pytest.mark.parametrize("kind", BUNDLES)
def test_a_hostile_bundle_is_refused(system: System, kind: str) -> None:
    assert_a_bundle_is_refused(system, "gvisor", kind)


@pytest.mark.parametrize("path", LAYERS)
def test_a_hostile_layer_is_refused(system: System, path: str) -> None:
    assert_a_layer_is_refused(system, "gvisor", path)


def test_who_prints_more_than_is_read_waits(system: System) -> None:
    """A full pipe blocks as any other does. What is too much for the log is dropped by the node."""
    system.deploy(HEAD + MISBEHAVES.replace("ONE", ONE).replace("misbehaves", "prints"), name="prints")
    assert system.ok("prints", {"how": "prints"}) == "well"


def _workers(system: System, function: str) -> set[str]:
    return {worker.worker for worker in system.info(function).workers}


@pytest.mark.parametrize("part", ["run", "gofer", "boot"])
def test_whichever_of_its_processes_is_killed_it_ends_whole_and_another_comes(system: System, part: str) -> None:
    """`boot` is the kernel, `gofer` its file server, `run` the parent of both."""
    system.deploy(HEAD + MISBEHAVES.replace("ONE", ONE).replace("misbehaves", "killed"), name="killed")
    name = system.ok("killed", {"how": "name"})
    mine = {pid: words for pid, words in sandboxes(system).items() if any(word.endswith(name) for word in words)}
    (victim,) = [pid for pid, words in mine.items() if part in words]
    assert len(mine) == 3, mine
    os.kill(victim, signal.SIGKILL)
    # Until it has ended, it may enter a call, which is lost with it; after that, no call is entered there.
    wait_until(lambda: not any(map(_alive, mine)), 20, what=f"the end of {mine}")
    assert system.ok("killed", {"how": "name"}, timeout_s=60) != name


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def test_all_end_with_their_node_however_it_ends(system: System) -> None:
    """The last test: the next node makes all waiting workers anew, among them one with torch inside gVisor."""
    system.deploy(HEAD + MISBEHAVES.replace("ONE", ONE).replace("misbehaves", "outlives"), name="outlives")
    assert system.ok("outlives") == "well"
    before, ended = sandboxes(system), _workers(system, "outlives")
    assert before
    system.kill(system.one("node"))
    wait_until(lambda: not any(map(_alive, before)), 20, what="the end of all sandboxes")
    wait_until(lambda: not ended & _workers(system, "outlives"), 20, what="the new node's report")
    assert system.ok("outlives", timeout_s=60) == "well"
