"""`fs dev`: what a ctrl-C ends while its system starts."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fleetstart.controller.cli.commands import dev

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
