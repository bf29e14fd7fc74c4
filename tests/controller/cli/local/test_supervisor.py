"""The supervisor with services of the test's own: backoff, stubborn processes, logs that grow."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetstart.controller.cli.home import HomeLayout, read_services, start_ticks
from fleetstart.controller.cli.local import running_service as module
from fleetstart.controller.cli.local import supervisor
from fleetstart.controller.cli.local.running_service import RunningService
from fleetstart.controller.cli.local.services import CONTROLLER, NODE, REDIS, Service
from fleetstart.controller.cli.local.supervisor import stop_order
from tests.servers import end, spawn, wait_until

PROGRAM = """
import os, sys
from pathlib import Path
from fleetstart.controller.cli.home import HomeLayout
from fleetstart.controller.cli.local.services import Service
from fleetstart.controller.cli.local.supervisor import Supervisor
services = [Service(name=n, argv=("sh", "-c", c), grace_s=0.5) for n, c in zip(sys.argv[2::2], sys.argv[3::2])]
Supervisor(services, HomeLayout(Path(sys.argv[1])), environ=os.environ, redis_socket=None).run()
"""


@pytest.fixture
def layout(tmp_path: Path) -> Iterator[HomeLayout]:
    layout = HomeLayout(tmp_path)
    layout.create()
    yield layout
    assert not [record for record in read_services(layout).values() if record.pid and start_ticks(record.pid)]


def supervised(layout: HomeLayout, **commands: str) -> list[str | Path]:
    pairs = [part for name, command in commands.items() for part in (name, command)]
    return [sys.executable, "-c", PROGRAM, layout.home, *pairs]


def test_what_dies_again_and_again_is_started_later_and_later_and_the_rest_lives(layout: HomeLayout) -> None:
    process = spawn(supervised(layout, bad="exit 3", good="exec sleep 60"))
    try:
        wait_until(lambda: _deaths(layout, "bad") >= 4, what="deaths")
        services = read_services(layout)
        assert services["good"].deaths == 0
        assert start_ticks(services["good"].pid) is not None
        assert services["bad"].deaths < 10
    finally:
        end(process)
    assert process.returncode == 0


def test_services_are_started_again_though_their_file_cannot_be_written(layout: HomeLayout) -> None:
    process = spawn(supervised(layout, one="echo $$; exec sleep 60"))
    try:
        first = wait_until(lambda: "one" in read_services(layout) and read_services(layout)["one"].pid, what="start")
        in_the_way = layout.services.with_name(f".{layout.services.name}.{process.pid}")
        in_the_way.mkdir()  # as a full disk would be
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: len(layout.log("one").read_text().split()) == 2, what="another start")
        assert (process.poll(), read_services(layout)["one"].pid) == (None, first)
        in_the_way.rmdir()
        wait_until(lambda: _deaths(layout, "one") == 1, what="the file")
    finally:
        end(process)


def test_a_binary_that_is_missing_is_tried_again(layout: HomeLayout) -> None:
    late = layout.home / "late"
    process = spawn(supervised(layout, late=f"exec {late}"))
    try:
        wait_until(
            lambda: read_services(layout).get("late") and read_services(layout)["late"].deaths >= 2, what="tries"
        )
        late.write_text("#!/bin/sh\nexec sleep 60\n")
        late.chmod(0o755)
        wait_until(lambda: b"sleep" in _command(read_services(layout)["late"].pid), 20, what="start")
    finally:
        end(process)


def test_a_process_that_ignores_the_signal_is_killed_with_its_children(layout: HomeLayout) -> None:
    process = spawn(supervised(layout, deaf="trap '' TERM; sleep 61 & echo $!; wait; sleep 62"))
    try:
        wait_until(lambda: layout.log("deaf").exists() and layout.log("deaf").read_text(), what="start")
        child = int(layout.log("deaf").read_text())
        assert start_ticks(child) is not None
    finally:
        end(process)
    assert process.returncode == 0
    wait_until(lambda: start_ticks(child) is None, what="end of the child")


def test_the_children_of_a_killed_supervisor_die(layout: HomeLayout) -> None:
    process = spawn(supervised(layout, one="exec sleep 60"))
    pid = wait_until(lambda: "one" in read_services(layout) and read_services(layout)["one"].pid, what="start")
    os.kill(process.pid, signal.SIGKILL)
    end(process)
    wait_until(lambda: start_ticks(pid) is None, what="end of the child")


def test_a_log_is_cut_and_the_one_before_it_kept(layout: HomeLayout) -> None:
    log = layout.log("x")
    running = RunningService(Service(name="x", argv=("true",)), log)
    with log.open("ab") as writer:
        writer.write(b"a" * (module.LOG_MAX_BYTES + 1))
        writer.flush()
        running.trim_log()
        assert log.stat().st_size == 0
        writer.write(b"b")
    assert log.read_bytes() == b"b"
    assert (layout.logs / "x.log.1").stat().st_size == module.LOG_MAX_BYTES + 1
    running.trim_log()
    assert log.read_bytes() == b"b"


def test_redis_is_stopped_last() -> None:
    assert stop_order([REDIS, CONTROLLER, NODE]) == [CONTROLLER, NODE, REDIS]
    assert stop_order([CONTROLLER, NODE]) == [CONTROLLER, NODE]


def _deaths(layout: HomeLayout, name: str) -> int:
    record = read_services(layout).get(name)
    return record.deaths if record else 0


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_an_unknown_log_format_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FS_LOG_FORMAT", "xml")
    assert supervisor.main(["--home", str(tmp_path / "home"), "--port", "0"]) == 2
    assert "FS_LOG_FORMAT='xml' must be text or json" in capsys.readouterr().err
