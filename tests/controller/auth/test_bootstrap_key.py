"""The first key at a real controller: made before anybody is let in, kept for the owner of the home, and made once."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from fleetstart.controller.auth.api_key import parse_key
from fleetstart.controller.schemas.access import AuditEvent
from fleetstart.runtime.contract import redis_keys as keys
from tests.controller.conftest import ControllerProcess
from tests.servers import RedisServer, end, free_port, spawn, wait_until


class Closed(ControllerProcess):
    """One that nobody has opened."""

    def __init__(self, home: Path, redis_url: str, **env: str) -> None:
        super().__init__(home, redis_url, **{"FS_OPEN": "0", **env})
        self.file = home / "key"

    def start(self) -> Closed:
        self.spawn()
        wait_until(lambda: self.status_code() == 200, 20, what="a controller that takes its home's key")
        return self

    def status_code(self) -> int:
        text = self.file.read_text().strip() if self.file.exists() else ""
        return self.get("/api/v1/status", text).status_code

    def get(self, path: str, text: str = "") -> httpx.Response:
        return self.http.get(path, headers={"authorization": f"Bearer {text}"} if text else {})


@pytest.fixture
def closed(tmp_path: Path, redis_url: str) -> Iterator[Closed]:
    process = Closed(tmp_path / "home", redis_url)
    try:
        yield process
    finally:
        process.close()


def names(redis_server: RedisServer) -> list[str]:
    with redis_server.client() as client:
        found: Any = client.hkeys(keys.KEYS)
    return sorted(name.decode() for name in found)


def test_nobody_is_let_in_before_the_first_key_is_there(closed: Closed) -> None:
    told: set[int] = set()
    stop = threading.Event()

    def call() -> None:
        with httpx.Client(base_url=closed.url, timeout=30, trust_env=False) as client:
            while not stop.is_set():
                told.add(client.get("/api/v1/functions").status_code)
                told.add(client.post("/fn/hello").status_code)
                told.add(client.post("/api/v1/keys", json={"name": "mine", "rights": ["admin"]}).status_code)

    callers = [threading.Thread(target=call) for _ in range(2)]
    for caller in callers:
        caller.start()  # they wait in the backlog of its socket, and are the first that it answers
    try:
        closed.start()
    finally:
        stop.set()
        for caller in callers:
            caller.join()
    assert told <= {401, 503}, told
    assert 401 in told


def test_who_shows_none_is_told_where_it_is_and_the_file_is_the_owners(
    closed: Closed, redis_server: RedisServer
) -> None:
    closed.start()
    refused = closed.get("/fn/hello")
    assert refused.status_code == 401
    assert refused.json()["error"]["message"] == "an API key is needed, and none was sent"
    for word in ("Authorization: Bearer", "FS_HOME/key", "fs key recover"):
        assert word in refused.json()["error"]["hint"]
    assert closed.get("/healthz").status_code == 200
    text = closed.file.read_text().strip()
    assert closed.get("/fn/hello", text).status_code == 404, "there is no such function, which it may know"
    assert closed.get("/api/v1/status", text).json()["access"] == "keys"
    assert stat.S_IMODE(closed.file.stat().st_mode) == 0o600
    assert [path.name for path in closed.home.iterdir() if path.name.startswith("key")] == ["key"]
    (info,) = closed.get("/api/v1/keys", text).json()
    assert (info["name"], info["rights"], info["created_by"], info["expires_unix_ms"]) == (
        "admin",
        ["admin"],
        "local",
        0,
    )
    assert text not in closed.log()
    with redis_server.client() as client:
        entries: Any = client.xrange(keys.AUDIT)
    events = [msgspec.json.decode(fields[b"event"], type=AuditEvent) for _, fields in entries]
    assert ("local", "key.create", "key admin") in {(one.by, one.verb, one.object) for one in events}


def test_a_restart_keeps_it_and_makes_no_other(closed: Closed, redis_server: RedisServer) -> None:
    closed.start()
    text = closed.file.read_text()
    closed.kill()
    closed.start()
    assert closed.file.read_text() == text
    assert names(redis_server) == ["admin"]


def test_a_redis_that_has_lost_it_knows_it_again(closed: Closed, redis_server: RedisServer) -> None:
    closed.start()
    text = closed.file.read_text().strip()
    with redis_server.client() as client:
        client.flushall()
    wait_until(lambda: names(redis_server) == ["admin"], what="the key, put there again")
    wait_until(lambda: closed.get("/api/v1/status", text).status_code == 200, what="the same key to be good")
    assert closed.get("/api/v1/status").status_code == 401


@pytest.mark.parametrize("damaged", ["", "fs_no", "fs_0123456789_" + "0" * 49])
def test_a_damaged_file_does_not_keep_it_from_starting(closed: Closed, damaged: str) -> None:
    closed.file.write_text(damaged)
    closed.start()
    parse_key(closed.file.read_text().strip())


def test_controllers_of_one_home_have_one_key_and_another_home_keeps_none(
    closed: Closed, redis_server: RedisServer, tmp_path: Path
) -> None:
    beside = Closed(closed.home, redis_server.url)
    other = Closed(tmp_path / "other", redis_server.url)
    try:
        closed.spawn()
        beside.spawn()
        wait_until(lambda: closed.status_code() == 200 == beside.status_code(), 20, what="both")
        other.spawn()
        wait_until(lambda: other.get("/api/v1/functions").status_code == 401, 20, what="the third")
        assert names(redis_server) == ["admin"]
        assert not other.file.exists()
    finally:
        beside.close()
        other.close()


def test_a_home_that_cannot_keep_it_stays_shut_and_says_so(closed: Closed) -> None:
    closed.file.mkdir()
    closed.spawn()
    wait_until(lambda: closed.get("/api/v1/functions").status_code == 503, 20, what="an answer")
    error = closed.get("/api/v1/functions").json()["error"]
    assert (error["message"], error["hint"]) == ("the first key is not created yet", "see the controller's log")
    assert str(closed.file) in closed.log()


def test_open_is_open_until_there_is_a_key(tmp_path: Path, redis_url: str) -> None:
    controller = ControllerProcess(tmp_path / "home", redis_url)
    try:
        controller.start()
        assert controller.http.get("/api/v1/status").json()["access"] == "open"
        assert not (controller.home / "key").exists()
        made = controller.http.post("/api/v1/keys", json={"name": "admin", "rights": ["admin"]}).json()
        assert controller.http.get("/api/v1/status").status_code == 401
        shown = {"authorization": f"Bearer {made['key']}"}
        assert controller.http.get("/api/v1/status", headers=shown).json()["access"] == "keys"
    finally:
        controller.close()


def test_open_is_for_loopback_alone(tmp_path: Path, redis_url: str) -> None:
    env = {
        **os.environ, "FS_HOME": str(tmp_path), "FS_REDIS_URL": redis_url, "FS_HOST": "0.0.0.0",
        "FS_PORT": str(free_port()), "FS_OPEN": "1",
    }  # fmt: skip
    argv = [sys.executable, "-m", "fleetstart.controller"]
    ran = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=30)
    assert ran.returncode == 2
    assert "FS_OPEN=1 is for 127.0.0.1 alone" in ran.stderr.splitlines()[-1]


def test_a_controller_that_others_reach_makes_it_where_it_is_told_to(tmp_path: Path, redis_url: str) -> None:
    port = free_port()
    env = {
        **os.environ, "FS_HOME": str(tmp_path), "FS_REDIS_URL": redis_url, "FS_HOST": "0.0.0.0", "FS_PORT": str(port),
    }  # fmt: skip
    argv = [sys.executable, "-m", "fleetstart.controller"]
    refused = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=30)
    assert refused.returncode == 2
    assert "FS_FIRST_KEY=1" in refused.stderr.splitlines()[-1]
    process = spawn(argv, env={**env, "FS_FIRST_KEY": "1"}, stderr=subprocess.DEVNULL)
    try:
        wait_until((tmp_path / "key").exists, 20, what="the first key")
        url = f"http://127.0.0.1:{port}/api/v1/status"

        def answers(**headers: str) -> int:
            try:
                return httpx.get(url, headers=headers, trust_env=False).status_code
            except httpx.TransportError:
                return 0

        shown = (tmp_path / "key").read_text().strip()
        wait_until(lambda: answers(authorization=f"Bearer {shown}") == 200, 20, what="an answer for the key")
        assert answers() == 401
    finally:
        end(process)
