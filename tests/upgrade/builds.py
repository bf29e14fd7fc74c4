"""Releases of this repository, each built as a wheel from a commit and installed in an environment of its own.

An environment has the wheel alone; packages that it needs come from the environment that runs this, whose own install
of fleetstart does not show there: it is found by an import hook, which only an environment's own folder may install.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "upgrade"


class NoSuchCommit(Exception):
    """The clone does not have the commit."""


@dataclass(frozen=True, slots=True)
class Build:
    commit: str
    title: str
    python: Path

    @property
    def fs(self) -> tuple[str, ...]:
        return str(self.python), "-P", "-m", "fleetstart.controller.cli"


def git(*arguments: str) -> str:
    """Errors: NoSuchCommit."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise NoSuchCommit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def build(name: str) -> Build:
    """Builds the commit of that name, unless it is there from an earlier run. Errors: NoSuchCommit."""
    commit = git("rev-parse", "--verify", f"{name}^{{commit}}")
    title = git("show", "--no-patch", "--format=%s", commit)
    folder = FOLDER / commit[:12]
    python = folder / "venv" / "bin" / "python"
    if not (folder / "built").exists():
        print(f"building {commit[:9]}, {title}", flush=True)
        _install(commit, folder, python)
        (folder / "built").touch()
    return Build(commit, title, python)


def _install(commit: str, folder: Path, python: Path) -> None:
    source = folder / "source"
    source.mkdir(parents=True, exist_ok=True)
    archive = subprocess.Popen(["git", "-C", str(ROOT), "archive", commit], stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x", "-C", str(source)], stdin=archive.stdout, check=True)
    if archive.wait():
        raise NoSuchCommit(f"git archive {commit} ended with {archive.returncode}")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    env = {**os.environ, "CMAKE_BUILD_PARALLEL_LEVEL": "1"}
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(source)], check=True, env=env)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    (wheel,) = folder.glob("fleetstart-*.whl")
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", str(wheel)], check=True)
    (own,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (own / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
