"""A machine whose kernel refuses namespaces: its node says so and runs nothing, unless its operator allows it."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import pytest

from fleetstart.runtime.isolation import seccomp
from tests.e2e.systems import System
from tests.servers import refusing_namespaces, wait_until

pytestmark = pytest.mark.isolations("namespaces", why="about kernels that refuse namespaces")

PROBE = """
import os, socket
from fleetstart.runtime import Scale, function

@function(memory="64MiB", scale=Scale(max=1, keep_alive_s=60))
def probe(home: str):
    seen = {}
    for name in ("key", "master.key"):
        try:
            seen[name] = len(open(os.path.join(home, name), "rb").read())
        except OSError as error:
            seen[name] = type(error).__name__
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(os.path.join(home, "run", "redis.sock"))
            sock.sendall(b"PING\\r\\n")
            seen["redis"] = sock.recv(100).decode()
    except OSError as error:
        seen["redis"] = type(error).__name__
    return seen
"""


@pytest.fixture(scope="module")
def refusing() -> Iterator[System]:
    if not seccomp.supported():
        pytest.skip(f"no call numbers for {platform.machine()}")
    system = System(env={"FS_PROFILES": "python", "FS_ISOLATION": ""})
    system.through = refusing_namespaces()
    try:
        yield system
    finally:
        system.close()


def test_a_worker_that_cannot_be_confined_does_not_run(refusing: System) -> None:
    """Else it would read the admin's key and the master key, and speak to Redis."""
    up = refusing.fs("up", "--port", "0", "--open")
    refusing.url = up.out.strip()
    refusing.http.base_url = refusing.url
    assert "warning: workers cannot be confined (no namespaces: [Errno 1] unshare(CLONE_NEWNS)" in up.err
    assert "FS_ISOLATION=best-effort" in up.err

    wait_until(lambda: refusing.status().nodes[0].confines == "none", 30, what="the node's word")
    shown = refusing.fs("nodes").out
    assert "isolation refused" in shown
    assert "the kernel refused: no namespaces: [Errno 1] unshare(CLONE_NEWNS)" in shown
    doctor = refusing.fs("doctor", "--no-measure", "--port", "1", code=1).out
    assert "a node here takes no functions" in doctor

    told = refusing.fs("deploy", str(refusing.source(PROBE, folder="probe")), "--name", "probe", "--no-probe")
    assert "its workers need namespaces, which the node has not" in told.out + told.err
    code, error = refusing.failed("probe", {"home": str(refusing.home)})
    assert (code, error.code) == (503, "unavailable")
    assert "unshare(CLONE_NEWNS)" in error.message
    assert "FS_ISOLATION=best-effort" in error.hint
    assert refusing.info("probe").workers == []


def test_its_operator_may_allow_plain_processes_and_sees_that_they_are(refusing: System) -> None:
    refusing.fs("down")
    refusing.env["FS_ISOLATION"] = "best-effort"
    refusing.up()
    seen = refusing.ok("probe", {"home": str(refusing.home)})
    assert seen["redis"].startswith(("+PONG", "-"))
    assert "isolation none (plain processes, as FS_ISOLATION=best-effort allows)" in refusing.fs("nodes").out
