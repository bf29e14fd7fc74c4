"""`fs dev`: a system that does not come up, or is interrupted while it does."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import click
import pytest

from fleetstart.controller.cli.commands import dev
from fleetstart.runtime.contract.errors import StartFailed

SILENT = [sys.executable, "-c", "import time; time.sleep(20)"]
"""A supervisor that has not yet taken the lock of its home, by which it is known."""


def test_ctrl_c_ends_a_supervisor_that_has_only_just_been_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(_: object, process: subprocess.Popen[bytes]) -> None:
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(dev, "supervisor_argv", lambda *_, **__: SILENT)
    monkeypatch.setattr(dev, "wait_ready", interrupted)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(KeyboardInterrupt), dev._own_system(0, keep_weights=True):
        pass
    assert started[0].returncode == -signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", [("--path", "/v1/models"), ("--body", '{"name": "Ada"}')])
def test_what_cold_calls_would_be_is_not_ignored_without_them(option: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(click.UsageError, match="for the calls of --cold"):
        dev.command.main(["handler.py", *option], obj=tmp_path, standalone_mode=False)


def test_a_start_that_fails_names_no_folder_that_is_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartFailed) as failed, dev._own_system(port, keep_weights=True):
            pass
    assert "; `--port 0` takes a free port" in capfd.readouterr().err
    assert str(tmp_path) not in failed.value.message + failed.value.hint
    assert list(tmp_path.iterdir()) == []
