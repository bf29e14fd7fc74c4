"""Two homes, one system: a node joins over TLS with a token, serves calls, is drained and removed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.controller.cli.system import System
from tests.servers import wait_until
from tests.tls.certificates import self_signed
from tests.tls.redis_tls import redis_with_tls

pytestmark = pytest.mark.e2e

HANDLER = """
from fleetstart.runtime import function


@function
def where(name: str) -> str:
    return f"hello {name}"
"""


@pytest.fixture
def systems(tmp_path: Path) -> Iterator[tuple[System, System]]:
    first, second = System(tmp_path / "first"), System(tmp_path / "second")
    yield first, second
    for system in (second, first):
        system.down()
        system.assert_gone()


@pytest.mark.timeout(400)
def test_a_second_machine_joins_serves_and_leaves(systems: tuple[System, System], tmp_path: Path) -> None:
    with redis_with_tls(tmp_path) as (redis_url, redis_ca):
        try:
            _join_serve_and_leave(redis_url, redis_ca, systems, tmp_path)
        finally:
            for system in reversed(systems):
                system.down()  # before its Redis


@dataclass(frozen=True, slots=True)
class Door:
    """Where machines join, and what the joining one needs to trust it."""

    url: str
    certificate: Path

    def trusting(self, token: str = "") -> dict[str, str]:
        trusted = {"SSL_CERT_FILE": str(self.certificate)}
        return trusted | {"FS_KEY": token} if token else trusted

    def join(self, second: System, token: str) -> None:
        joined = second.fs(
            *("node", "join", self.url, "--name", "vm2", "--address", "127.0.0.1", "--region", "eu"),
            env=self.trusting(token),
        )
        assert joined.stdout.strip() == "vm2"


def _join_serve_and_leave(redis_url: str, redis_ca: Path, systems: tuple[System, System], tmp_path: Path) -> None:
    first, second = systems
    door = _up_with_tls(first, redis_url, redis_ca, tmp_path)
    _join_with_a_token(first, second, door, tmp_path)
    _drain_and_serve_elsewhere(first, tmp_path)
    _remove_and_join_again(first, second, door)


def _up_with_tls(first: System, redis_url: str, redis_ca: Path, tmp_path: Path) -> Door:
    of_redis = {"FS_REDIS_URL": redis_url}
    untrusted = first.fs("up", "--port", "0", code=1, env=of_redis).stderr
    assert "TLS failed" in untrusted, "its certificate is not one that the machine trusts"
    assert "FS_REDIS_CA" in untrusted
    of_redis["FS_REDIS_CA"] = str(redis_ca)
    certificate, key_file = self_signed(tmp_path)
    options = ("--port", "0", "--listen", "127.0.0.1:0", "--tls-cert", certificate, "--tls-key", key_file, "--json")
    up = first.fs("up", *options, env={"FS_NODE": "vm1", **of_redis})
    assert not [words for words in _command_lines() if ":pw@" in words], "all users may read command lines"
    assert (first.layout.supervisor.stat().st_mode & 0o777) == 0o600
    return Door(msgspec.json.decode(up.stdout)["public_url"], certificate)


def _join_with_a_token(first: System, second: System, door: Door, tmp_path: Path) -> None:
    token = first.fs("node", "token", "--expires", "10m").stdout.strip()
    env = door.trusting(token)
    assert "needs admin" in second.fs("key", "ls", "--url", door.url, code=1, env=env).stderr, "it is for joining"
    taken = second.fs("node", "join", door.url, "--name", "vm1", code=1, env=env)
    assert "node vm1 is alive already, at 127.0.0.1" in taken.stderr
    assert "fs node join --name NAME" in taken.stderr
    door.join(second, token)
    assert set(second.services()) == {"node"}
    for secret in ("join.json", "node/identity.json"):
        assert (second.home / secret).stat().st_mode & 0o777 == 0o600
    replayed = System(tmp_path / "third").fs("node", "join", door.url, "--name", "vm3", code=1, env=env)
    assert "revoked" in replayed.stderr, "a token is good once"
    wait_until(lambda: {"vm1", "vm2"} <= _names(first), 30, what="nodes")
    assert "certificate until" in first.fs("nodes", "vm2").stdout
    assert "a node of the system at https://" in second.fs("up", code=1).stderr


def _drain_and_serve_elsewhere(first: System, tmp_path: Path) -> None:
    """A drained node gets no workers, and the other serves; then the other way round."""
    assert "vm1 drains" in first.fs("node", "drain", "vm1").stdout
    handler = tmp_path / "handler.py"
    handler.write_text(HANDLER)
    first.fs("deploy", handler, "--name", "where")
    assert "hello Ada" in first.fs("invoke", "where", '{"name": "Ada"}').stdout
    status = msgspec.json.decode(first.fs("status", "--json").stdout)
    assert status["draining"] == ["vm1"]
    assert {worker["node"] for info in status["functions"] for worker in info["workers"]} == {"vm2"}
    assert "draining: it gets no workers" in first.fs("node", "ls", "vm1").stdout

    first.fs("node", "drain", "vm1", "--undo")
    first.fs("node", "drain", "vm2")
    assert "hello Bob" in first.fs("invoke", "where", '{"name": "Bob"}').stdout
    wait_until(lambda: _workers(first) <= {"vm1"}, 30, what="workers on vm1")


def _remove_and_join_again(first: System, second: System, door: Door) -> None:
    assert "node vm2 is alive" in first.fs("node", "remove", "vm2", code=1).stderr
    second.down()
    wait_until(lambda: _names(first) == {"vm1"}, 30, what="vm2 gone")
    assert "vm2 is removed" in first.fs("node", "remove", "vm2").stdout
    assert "does not exist" in first.fs("node", "remove", "vm2", code=3).stderr

    # What it was told is in its home, and nobody vouches for it any more: it comes back with another token.
    gone = second.fs("node", "join", code=1, env=door.trusting())
    assert "this key is not that of node vm2: it was removed" in gone.stderr
    door.join(second, first.fs("node", "token").stdout.strip())
    wait_until(lambda: "vm2" in _names(first), 30, what="vm2 back")

    # One that was not removed needs no token. A daemon that died comes back drained, a node that joins does not.
    first.fs("node", "drain", "vm2")
    second.kill("node")
    wait_until(lambda: "vm2" in _names(first), 30, what="vm2 back after its death")
    assert _draining(first) == ["vm2"]
    second.down()
    wait_until(lambda: _names(first) == {"vm1"}, 30, what="vm2 gone")
    assert second.fs("node", "join", env=door.trusting()).stdout.strip() == "vm2"
    wait_until(lambda: "vm2" in _names(first), 30, what="vm2 back again")
    wait_until(lambda: not _draining(first), what="vm2 to have workers again")
    assert _reports(first)["vm2"]["region"] == "eu", "as it joined"


def test_a_private_redis_is_refused_with_what_to_do(systems: tuple[System, System]) -> None:
    first, second = systems
    url = first.up(is_open=False)
    token = first.fs("node", "token").stdout.strip()
    refused = second.fs("node", "join", url, "--name", "vm2", "--token", token, code=1).stderr
    assert "a private Unix socket, which no other machine reaches" in refused
    assert "fs up --redis redis://" in refused
    assert "no node of" in second.fs("node", "join", code=1).stderr
    assert "a join token is needed" in second.fs("node", "join", url, code=1).stderr


def _command_lines() -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [words for words in found if "fleetstart" in words]


def _reports(system: System) -> dict[str, dict[str, Any]]:
    return {report["node"]: report for report in msgspec.json.decode(system.fs("node", "ls", "--json").stdout)}


def _names(system: System) -> set[str]:
    return set(_reports(system))


def _draining(system: System) -> list[str]:
    found: list[str] = msgspec.json.decode(system.fs("status", "--json").stdout)["draining"]
    return found


def _workers(system: System) -> set[str]:
    status = msgspec.json.decode(system.fs("status", "--json").stdout)
    return {worker["node"] for info in status["functions"] for worker in info["workers"] if worker["state"] == "ready"}
