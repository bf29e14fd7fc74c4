"""The node of the first machine, at an address that others reach: its controller vouches for it, without a token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.controller.cli.system import System
from tests.testbed.network import Network, why_not

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces")]

HANDLER = """
from fleetstart.runtime import function


@function
def where(name: str) -> str:
    return f"hello {name}"
"""


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    network = Network(["a"], prefix="10.79.0")
    system = System(tmp_path / "home", inside=network.entered("a", []))
    yield system
    system.down()
    system.assert_gone()
    network.close()


def test_the_first_machine_s_own_node_needs_no_token(system: System, tmp_path: Path) -> None:
    address = {"FS_NODE_ADDRESS": "10.79.0.1", "FS_NODE": "vm1"}
    system.fs("up", "--port", "0", env=address)
    identity = system.home / "node" / "identity.json"
    assert identity.stat().st_mode & 0o777 == 0o600
    handler = tmp_path / "handler.py"
    handler.write_text(HANDLER)
    system.fs("deploy", handler, "--name", "where")
    assert "hello Ada" in system.fs("invoke", "where", '{"name": "Ada"}').stdout
    status = msgspec.json.decode(system.fs("status", "--json").stdout)
    [worker] = [worker for info in status["functions"] for worker in info["workers"] if worker["endpoint"]]
    assert worker["endpoint"].startswith("10.79.0.1:")
    before = identity.read_bytes()
    assert "certificate until" in system.fs("nodes").stdout
    # The same key, after a restart.
    system.down()
    system.fs("up", "--port", "0", env=address)
    assert "hello Bob" in system.fs("invoke", "where", '{"name": "Bob"}').stdout
    key = msgspec.json.decode(before)["key"]
    assert msgspec.json.decode(identity.read_bytes())["key"] == key
