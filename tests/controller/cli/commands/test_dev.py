"""`fs dev`: a system that does not come up, or is interrupted while it does."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

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


def test_a_start_that_fails_names_no_folder_that_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartFailed) as failed, dev._own_system(port, keep_weights=True):
            pass
    assert str(tmp_path) not in failed.value.message + failed.value.hint
    assert list(tmp_path.iterdir()) == []
