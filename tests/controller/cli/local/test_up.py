"""The supervisor with real processes: what dies comes back, what is stopped is gone, and nothing is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from subprocess import PIPE

import pytest

from fleetstart.controller.cli.home import SupervisorRecord, read_record, read_supervisor
from fleetstart.controller.cli.local.services import CONTROLLER, NODE, REDIS
from tests.controller.cli.system import FS, System
from tests.servers import end, listening_socket, shared_memory, spawn, wait_until

pytestmark = pytest.mark.e2e


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    system = System(tmp_path / "home")
    yield system
    system.down()
    system.assert_gone()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A system whose parts are killed by several tests, and come back."""
    system = System(tmp_path_factory.mktemp("running") / "home")
    system.up()
    try:
        yield system
    finally:
        system.down()
    system.assert_gone()


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/healthz", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def test_up_is_idempotent_and_down_leaves_nothing(system: System) -> None:
    shared = shared_memory()
    url = system.up("--region", "eu")
    assert healthy(url)
    assert "region eu" in system.fs("nodes").stdout
    again = system.fs("up", "--port", "0", "--region", "us")
    assert again.stdout.strip() == url
    assert "already up" in again.stderr
    assert f"ignored, as it runs already: --port, --region (it runs at {url}" in again.stderr
    assert set(system.services()) == {REDIS, CONTROLLER, NODE}
    system.down()
    system.assert_gone()
    assert shared_memory() <= shared
    assert not healthy(url)
    assert "nothing runs" in system.fs("down").stderr


def test_no_connection_is_refused_while_the_controller_is_replaced(running: System) -> None:
    url = running.url
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    refused: list[OSError] = []
    stop = threading.Event()

    def connect() -> None:
        while not stop.is_set():
            try:
                socket.create_connection(address, timeout=5).close()
            except OSError as error:
                refused.append(error)
            time.sleep(0.002)

    thread = threading.Thread(target=connect)
    thread.start()
    try:
        for _ in range(2):
            running.kill(CONTROLLER)
            wait_until(lambda: healthy(url), what="health")
    finally:
        stop.set()
        thread.join()
    assert refused == []


@pytest.mark.parametrize("service", [CONTROLLER, NODE, REDIS])
def test_what_is_killed_is_started_again(running: System, service: str) -> None:
    before = running.services()[service].deaths
    record = running.kill(service)
    assert record.deaths == before + 1
    wait_until(lambda: '"redis": "ok"' in running.fs("status", "--json").stdout, 20, what="status")
    wait_until(lambda: "isolation" in running.fs("status").stdout, 20, what="node")


def test_a_killed_supervisor_takes_everything_with_it_and_up_works_again(system: System) -> None:
    system.up()
    record = read_record(system.layout.supervisor, SupervisorRecord)
    assert record is not None
    os.kill(record.pid, signal.SIGKILL)
    wait_until(lambda: not system.pids(), what="orphans")
    assert system.fs("status", code=4).stderr
    assert healthy(system.up())


def test_run_files_that_a_cleaner_removed_are_written_again(system: System) -> None:
    url = system.up()
    redis = system.services()[REDIS].pid
    shutil.rmtree(system.layout.run)
    wait_until(lambda: system.layout.endpoint.exists() and REDIS in system.services(), what="run files")
    wait_until(lambda: system.services()[REDIS].pid not in (0, redis), what="another Redis, at the socket's path")
    wait_until(lambda: '"redis": "ok"' in system.fs("status", "--json", code=None).stdout, 30, what="status")
    assert system.fs("up").stdout.strip() == url


def test_down_finds_the_supervisor_by_the_lock_alone(system: System) -> None:
    system.up()
    record = read_supervisor(system.layout)
    assert record is not None
    os.kill(record.pid, signal.SIGSTOP)  # it cannot write its files again
    try:
        shutil.rmtree(system.layout.run)
        assert read_supervisor(system.layout) == record
    finally:
        os.kill(record.pid, signal.SIGCONT)
    system.down()
    system.assert_gone()


def test_down_says_what_it_waits_for_and_need_not_wait(system: System, tmp_path: Path) -> None:
    env = {**os.environ, "FS_HOME": str(system.home)}
    _interrupted_up(env | {"FS_DRAIN_S": "30"})
    assert "already up" in system.fs("up").stderr
    handler = tmp_path / "handler.py"
    handler.write_text(
        "import time\nfrom fleetstart.runtime import function\n"
        "@function\ndef slow():\n    print('begun', flush=True)\n    time.sleep(60)\n"
    )
    system.fs("deploy", handler)
    call = spawn([str(FS), "invoke", "slow", "{}"], env=env)
    try:
        wait_until(lambda: "begun" in system.fs("logs", "slow").stdout, 20, what="the call has begun")
        waiting = spawn([str(FS), "down", "--json"], env=env, stderr=PIPE)
        assert waiting.stderr is not None
        told = waiting.stderr.readline().decode()
        assert "waiting for the controller, at most 35 s: it lets the calls in progress end" in told
        another = spawn([str(FS), "down", "--json"], env=env, stderr=PIPE)
        assert another.stderr is not None
        assert "waiting for the controller" in another.stderr.readline().decode(), "it cuts no call either"
        system.fs("down", "--now")
        for down in (waiting, another):
            assert "down" in down.communicate(timeout=20)[1].decode()
            assert down.returncode == 0
    finally:
        end(call)
    system.assert_gone()


def _interrupted_up(env: Mapping[str, str]) -> None:
    """Ctrl-C while `fs up` waits: the system goes on starting, and that is said."""
    process = spawn([str(FS), "up", "--port", "0", "--open"], env=env, stdout=PIPE, stderr=PIPE)
    assert process.stderr is not None
    assert "waiting for the supervisor" in process.stderr.readline().decode()
    process.send_signal(signal.SIGINT)
    assert "it goes on starting in the background; `fs down` stops it" in process.communicate(timeout=20)[1].decode()
    assert process.returncode == 130


def test_a_port_that_is_taken_is_said_and_nothing_stays(system: System) -> None:
    with listening_socket() as taken:
        port = taken.getsockname()[1]
        result = system.fs("up", "--port", str(port), code=1)
    assert f"cannot listen on 127.0.0.1:{port}: " in result.stderr
    assert "Address already in use" in result.stderr
    assert "--port 0" in result.stderr
    system.assert_gone()


def test_backends_that_cannot_be_used_are_said_at_once_and_nothing_stays(system: System, tmp_path: Path) -> None:
    refused = system.fs("up", "--redis", "redis://:secret@127.0.0.1:1/0", code=1).stderr
    assert "redis://:***@127.0.0.1:1/0: it refused the connection" in refused
    (tmp_path / "file").touch()
    assert "cannot be made" in system.fs("up", "--store", tmp_path / "file" / "store", code=1).stderr
    system.assert_gone()


def test_status_and_doctor_try_the_store_of_a_running_system(system: System) -> None:
    system.up()
    told = system.fs("doctor", "--no-measure", code=None).stdout
    assert "wrote, read and deleted an object" in told
    assert "wrote, read and deleted a key" in told
    assert "store    " not in system.fs("status").stdout
    shutil.rmtree(system.home / "store")
    (system.home / "store").touch()
    assert "cannot be written to" in system.fs("status").stdout
    assert "cannot be made" in system.fs("doctor", "--no-measure", code=1).stdout


def test_a_home_too_deep_for_a_socket_gets_a_short_one(tmp_path: Path) -> None:
    system = System(tmp_path / ("deep" * 30))
    try:
        assert healthy(system.up())
        record = read_record(system.layout.supervisor, SupervisorRecord)
        assert record is not None
        assert Path(record.socket_dir).is_dir()
    finally:
        system.down()
    system.assert_gone()
    assert not Path(record.socket_dir).exists()


def test_a_call_under_way_is_answered_and_billed_once_though_the_controller_is_killed(
    running: System, tmp_path: Path
) -> None:
    began = tmp_path / "handler.py"
    began.write_text(
        "import time\nfrom fleetstart.runtime import function\n"
        "@function(concurrency=2)\ndef slow():\n    print('begun', flush=True)\n    time.sleep(2)\n    return 'done'\n"
    )
    running.fs("deploy", began)
    results: list[str] = []
    thread = threading.Thread(target=lambda: results.append(running.fs("invoke", "slow", "{}").stdout))
    thread.start()
    try:
        wait_until(lambda: "begun" in running.fs("logs", "slow").stdout, 20, what="the call has begun")
        running.kill(CONTROLLER)
    finally:
        thread.join()
    assert results == ['"done"']
    lines = json.loads(running.fs("usage", "slow", "--json").stdout)["lines"]
    assert [line["rows"] for line in lines if line["kind"] == "invocation"] == [1]


def test_logs_are_followed_over_a_restart_of_the_controller(running: System, tmp_path: Path) -> None:
    handler = tmp_path / "handler.py"
    handler.write_text("from fleetstart.runtime import function\n@function\ndef say(text: str):\n    print(text)\n")
    running.fs("deploy", handler)
    running.fs("invoke", "say", '{"text": "first"}')
    shown = tmp_path / "shown"
    with shown.open("wb") as out:
        env = {**os.environ, "FS_HOME": str(running.home)}
        follower = spawn([FS, "logs", "say", "--follow"], stdout=out, stderr=out, env=env)
    try:
        wait_until(lambda: "first" in shown.read_text(), 20, what="the first line")
        running.kill(CONTROLLER)
        running.fs("invoke", "say", '{"text": "second"}')
        wait_until(lambda: "second" in shown.read_text(), 20, what="the second line")
        assert shown.read_text().count("first") == 1
        follower.send_signal(signal.SIGINT)
        assert follower.wait(10) == 0
    finally:
        end(follower)
