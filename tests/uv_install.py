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
from pathlib import Path
from types import ModuleType

SETTINGS = Path(__file__).parents[1] / "controller/cli/packages/index_settings.py"
PIP_ONLY = {"constraint", "require-hashes", "no-binary", "only-binary", "pre", "proxy", "client-cert"}


def main(arguments: list[str]) -> int:
    settings = _module(SETTINGS)
    pip: dict[str, str] = settings.pip_settings(os.environ, Path.home())
    if not PIP_ONLY & set(pip):
        uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--quiet", "--python", sys.executable]
        env = {**os.environ, **settings.build_environment(os.environ, pip)}
        done = subprocess.run([*uv, *arguments], env=env, stderr=subprocess.PIPE, text=True)
        if done.returncode == 0:
            return 0
        print(f"uv cannot, and pip is tried: {done.stderr.strip()[-2000:]}", file=sys.stderr)
    argv = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-compile"]
    return subprocess.run([*argv, *arguments]).returncode


def _module(path: Path) -> ModuleType:
    """A module of a package that is not installed yet."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
