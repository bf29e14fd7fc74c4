"""Installs packages into this Python's environment by uv, in a tenth of pip's time; by pip where uv cannot.

uv does not read pip's settings, so it gets them in its own names. Where pip has one that uv has no name for, pip does
it.

Run: python tests/uv_install.py ARGUMENTS-OF-PIP-INSTALL
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

SETTINGS = Path(__file__).parents[1] / "controller/cli/packages/index_settings.py"
PIP_ONLY = {"constraint", "require-hashes", "no-binary", "only-binary", "pre", "proxy", "client-cert"}


class Command(NamedTuple):
    argv: Sequence[str]
    env: Mapping[str, str]


def commands(arguments: Sequence[str], env: Mapping[str, str], home: Path) -> list[Command]:
    """Commands that install the same, the quickest first."""
    settings = _module(SETTINGS)
    pip_settings: dict[str, str] = settings.pip_settings(env, home)
    uv = (str(Path(sys.executable).with_name("uv")), "pip", "install", "--quiet", "--python", sys.executable)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-compile")
    by_uv = Command([*uv, *arguments], {**env, **settings.build_environment(env, pip_settings)})
    by_pip = Command([*pip, *arguments], env)
    return [by_pip] if PIP_ONLY & set(pip_settings) else [by_uv, by_pip]


def run_until_one_ends_well(tried: Sequence[Command]) -> int:
    """Exit code of the last command; says of the others why they failed."""
    *others, last = tried
    for command in others:
        done = subprocess.run(command.argv, env=command.env, stderr=subprocess.PIPE, text=True)
        if done.returncode == 0:
            return 0
        print(f"{command.argv[0]}: {done.stderr.strip()[-2000:]}\nanother way is tried", file=sys.stderr)
    return subprocess.run(last.argv, env=last.env).returncode


def _module(path: Path) -> ModuleType:
    """Module of a package that is not installed yet."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(run_until_one_ends_well(commands(sys.argv[1:], os.environ, Path.home())))
