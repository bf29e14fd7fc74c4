"""What installs a checkout's packages: uv, with pip's settings; pip where uv cannot."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import uv_install


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[list[str], dict[str, str]]]:
    """What was run; whatever names uv fails if `UV_FAILS` is set."""
    calls: list[tuple[list[str], dict[str, str]]] = []

    def run(argv: list[Any], env: dict[str, str] | None = None, **more: Any) -> subprocess.CompletedProcess[str]:
        calls.append(([str(word) for word in argv], env or {}))
        return subprocess.CompletedProcess(argv, int("UV_FAILS" in (env or {})), "", "no such package")

    for name in ("PIP_CONSTRAINT", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_uv_has_the_indexes_of_pip(
    monkeypatch: pytest.MonkeyPatch, ran: list[tuple[list[str], dict[str, str]]]
) -> None:
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://packages.example/simple")
    assert uv_install.main(["-r", "dev.txt"]) == 0
    ((argv, env),) = ran
    assert Path(argv[0]).name == "uv"
    assert argv[-2:] == ["-r", "dev.txt"]
    assert env["UV_INDEX"] == "https://packages.example/simple"


def test_pip_does_what_uv_has_no_word_for(
    monkeypatch: pytest.MonkeyPatch, ran: list[tuple[list[str], dict[str, str]]]
) -> None:
    monkeypatch.setenv("PIP_CONSTRAINT", "/etc/constraints.txt")
    assert uv_install.main(["-r", "dev.txt"]) == 0
    ((argv, _),) = ran
    assert argv[1:3] == ["-m", "pip"]
    assert argv[-2:] == ["-r", "dev.txt"]


def test_pip_is_tried_after_uv_and_why_is_said(
    monkeypatch: pytest.MonkeyPatch,
    ran: list[tuple[list[str], dict[str, str]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("UV_FAILS", "1")
    assert uv_install.main(["-r", "dev.txt"]) == 0
    assert [argv[1] for argv, _ in ran] == ["pip", "-m"]
    assert "no such package" in capsys.readouterr().err
