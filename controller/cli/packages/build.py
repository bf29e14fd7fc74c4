"""Resolves requirements into a lock, and installs a lock into a folder that depends on the lock alone.

The same lock gives the same bytes wherever it is built: bytecode is compiled with names relative to the folder and
valid whatever the files' times, and what names this machine (scripts with its Python, origins of wheels) is left out.
So equal locks are one layer.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fleetstart.runtime.contract.errors import BuildFailed

from .requirements import Requirements, index_options
from .unpacking import UnpackLimits
from .uv import run_uv

Log = Callable[[str], object]

PLATFORM = "fleetstart"
"""Name of the platform's own package: a project may list it, and it is there already."""
UNPACK_LIMITS = UnpackLimits()
SHARED = ("msgspec",)
"""Packages of which a function gets the platform's version, because both must know the same types."""
_LOCAL_FILES = ("direct_url.json", "uv_cache.json", "uv_build.json")
_PINNED = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)\s*==\s*([^\s;\\]+)", re.MULTILINE)


def constraints() -> str:
    """Versions that packages shared with the platform must have."""
    lines = []
    for name in SHARED:
        try:
            lines.append(f"{name}=={version(name)}\n")
        except PackageNotFoundError:
            continue
    return "".join(lines)


def resolve(
    needed: Requirements, work: Path, env: Mapping[str, str], log: Log, limits: UnpackLimits = UNPACK_LIMITS
) -> str:
    """The lock of requirements: every package with version and hashes. Errors: BuildFailed."""
    what = f"{needed.origin} cannot be resolved"
    if needed.kind == "pylock":
        return needed.text
    lock = work / "lock.txt"
    common = ["--no-header", "--no-annotate", "--output-file", str(lock), "--python", sys.executable]
    if needed.kind == "uv.lock":
        arguments = ["export", "--frozen", "--no-dev", "--no-emit-project", "--no-emit-package", PLATFORM]
        arguments += ["--format", "requirements.txt", "--project", str(needed.folder), *common]
        run_uv(arguments, env, needed.folder, log, what, work=work, limits=limits)
        return lock.read_text()
    source = needed.path  # it names other files by paths from there
    if source is None:
        source = work / "requirements.in"
        source.write_text(needed.text)
    (work / "constraints.txt").write_text(constraints())
    (work / "overrides.txt").write_text(f"{PLATFORM} ; sys_platform == 'never'\n")
    arguments = ["pip", "compile", str(source), "--generate-hashes", *common]
    arguments += ["--constraint", str(work / "constraints.txt"), "--override", str(work / "overrides.txt")]
    run_uv(arguments, env, needed.folder, log, what, work=work, limits=limits)
    return lock.read_text()


def packages_of(lock: str) -> list[str]:
    """The packages of a lock, as `name==version`."""
    return [f"{name}=={number}" for name, number in _PINNED.findall(lock)]


def install(
    needed: Requirements,
    lock: str,
    work: Path,
    env: Mapping[str, str],
    log: Log,
    limits: UnpackLimits = UNPACK_LIMITS,
) -> Path:
    """Installs a lock into a new folder; returns the folder. Errors: BuildFailed."""
    target = work / "files"
    source = work / ("pylock.toml" if needed.kind == "pylock" else "locked.txt")
    source.write_text(lock)
    arguments = ["pip", "install", "--target", str(target), "--requirement", str(source), "--no-deps"]
    arguments += ["--python", sys.executable, "--link-mode", "copy", *index_options(needed)]
    what = f"{needed.origin} cannot be installed"
    run_uv(arguments, env, needed.folder, log, what, work=work, limits=limits)
    target.mkdir(exist_ok=True)
    _compile(target, env, log)
    normalise(target)
    return target


def _compile(target: Path, env: Mapping[str, str], log: Log) -> None:
    log("Compiling bytecode")
    command = [sys.executable, "-m", "compileall", "-q", "-q", "-f", "-j", "0", "-s", str(target)]
    command += ["--invalidation-mode", "unchecked-hash", str(target)]
    # A file that cannot be compiled is a template or for another Python, and is then never imported.
    done = subprocess.run(command, env=dict(env), cwd=target, capture_output=True, text=True)
    if done.returncode > 1:
        raise BuildFailed(f"bytecode could not be compiled: {done.stderr.strip()[-500:]}")


def normalise(target: Path) -> None:
    """Removes from installed packages what names the machine that they were installed on."""
    (target / ".lock").unlink(missing_ok=True)
    (target / "CACHEDIR.TAG").unlink(missing_ok=True)
    removed: set[str] = set()
    for script in sorted((target / "bin").glob("*")):
        if script.is_file() and script.open("rb").read(2) == b"#!":
            removed.add(f"bin/{script.name}")
            script.unlink()
    if (target / "bin").is_dir() and not any((target / "bin").iterdir()):
        shutil.rmtree(target / "bin")
    for folder in sorted(target.glob("*.dist-info")):
        for name in _LOCAL_FILES:
            if (folder / name).exists():
                (folder / name).unlink()
                removed.add(f"{folder.name}/{name}")
        record = folder / "RECORD"
        if record.is_file():
            lines = record.read_text().splitlines()
            kept = sorted(line for line in lines if not line.startswith("../") and line.split(",")[0] not in removed)
            record.write_text("".join(f"{line}\n" for line in kept))
