from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from fleetstart.controller.cli.doctor.checks import check_home
from fleetstart.controller.cli.home import (
    HomeLayout,
    SupervisorRecord,
    is_locked,
    read_record,
    start_ticks,
    tail,
    try_lock,
    write_atomically,
)
from fleetstart.runtime.contract.errors import Refused
from tests.servers import end, spawn, wait_until


def record(socket_dir: str = "") -> SupervisorRecord:
    return SupervisorRecord(pid=1, start_ticks=1, url="u", redis_url="r", store="s", socket_dir=socket_dir)


def test_sockets_lie_in_run_unless_the_path_is_too_long(tmp_path: Path) -> None:
    short = HomeLayout(Path("/tmp/h"))
    assert short.socket_dir(str(tmp_path)) == short.run
    long = HomeLayout(tmp_path / ("x" * 100))
    folder = long.socket_dir("/tmp")
    try:
        assert len(str(folder / "redis.sock")) < 107
        assert folder.stat().st_mode & 0o777 == 0o700
    finally:
        folder.rmdir()


def test_cleaning_takes_a_foreign_socket_folder_with_it(tmp_path: Path) -> None:
    layout = HomeLayout(tmp_path / "home")
    layout.create()
    folder = tmp_path / "fleetstart-x"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(folder / "redis.sock"))
    write_atomically(layout.supervisor, msgspec.json.encode(record(str(folder))))
    layout.clean_run()
    assert not folder.exists()
    assert not layout.run.exists()
    assert layout.logs.exists()


def test_cleaning_removes_nothing_that_is_not_ours(tmp_path: Path) -> None:
    """The record is a file: whatever it names, only sockets in a folder of our naming go."""
    layout = HomeLayout(tmp_path / "home")
    for name in ("precious", "fleetstart-full"):
        layout.create()
        folder = tmp_path / name
        folder.mkdir()
        (folder / "data").write_text("x")
        write_atomically(layout.supervisor, msgspec.json.encode(record(str(folder))))
        layout.clean_run()
        assert (folder / "data").exists()


def test_a_lock_is_held_by_one_and_freed_by_death(tmp_path: Path) -> None:
    lock = tmp_path / "home" / "lock"
    assert not is_locked(lock)
    program = (
        "import sys, time; from pathlib import Path; from fleetstart.controller.cli.home import try_lock\n"
        f"with try_lock(Path({str(lock)!r})) as mine: print(mine, flush=True); time.sleep(60)"
    )
    process = spawn([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"True\n"
        assert is_locked(lock)
        with try_lock(lock) as mine:
            assert not mine
        process.kill()
        end(process)
    wait_until(lambda: not is_locked(lock), what="lock")


def test_a_process_is_known_by_its_start() -> None:
    assert start_ticks(os.getpid()) == start_ticks(os.getpid())
    assert start_ticks(2**22 + 1) is None


def test_records_that_cannot_be_read_are_none(tmp_path: Path) -> None:
    assert read_record(tmp_path / "none", SupervisorRecord) is None
    (tmp_path / "bad").write_text("{")
    assert read_record(tmp_path / "bad", SupervisorRecord) is None


def test_the_tail_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    assert tail(log, 3) == []
    log.write_bytes(b"".join(b"line %d\n" % number for number in range(20_000)) + b"\xff end")
    assert tail(log, 2) == ["line 19999", "� end"]


def test_a_home_whose_name_is_no_text_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    home = tmp_path / "h\udce9me"
    with pytest.raises(Refused, match="its name is not UTF-8"):
        HomeLayout(home).create()
    assert not home.exists()
    assert check_home(home).verdict == "bad"
