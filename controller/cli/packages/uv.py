"""Runs uv: its log goes to the caller line by line, its failure becomes one sentence."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fleetstart.runtime.contract.errors import BuildFailed
from fleetstart.runtime.contract.process.parent_death import kill_with_parent

from .unpacking import UnpackLimits, UnpackWatch, too_much

TOO_MUCH_HINT = "nothing was changed, and nothing of it is left; is the package what it should be?"
LINES_KEPT = 60
"""Last lines of a log of which the sentence is made: uv explains a conflict in fewer."""
SENTENCE_MAX = 2000
_EFBIG = f"(os error {errno.EFBIG})"
_FRAME = re.compile(r"^[\s×╰─▶├│▪·•]+")
_NOISE = ("Resolved ", "Prepared ", "Using Python", "Using CPython", "Downloading ", "Building ", "Downloaded ")


def find_uv() -> str:
    """Path of the uv program. Errors: BuildFailed."""
    try:
        from uv import find_uv_bin

        return str(find_uv_bin())
    except (ImportError, FileNotFoundError):
        found = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if found is None:
        raise BuildFailed("requirements are installed with uv, which is not there", hint="pip install uv")
    return found


def run_uv(
    arguments: Sequence[str],
    env: Mapping[str, str],
    cwd: Path,
    log: Callable[[str], object],
    what: str,
    *,
    work: Path,
    limits: UnpackLimits,
) -> None:
    """Runs uv to its end, or to that of this process, however it comes. `what` is what it was to do, `work` the folder
    of this build. Errors: BuildFailed with uv's own sentence, or with what it unpacked beyond the limits."""
    lines: list[str] = []
    program, temporary = find_uv(), work / "tmp"
    temporary.mkdir(exist_ok=True)  # of a uv without a cache; ended with the build's folder
    env = {**env, "TMPDIR": str(temporary)}
    cache = subprocess.run([program, "cache", "dir"], env=env, cwd=cwd, capture_output=True, text=True).stdout.strip()
    watch = UnpackWatch(work, Path(cache or temporary).resolve(), limits)
    with subprocess.Popen(
        [program, *arguments],
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        preexec_fn=_in_child(limits),
    ) as process:
        assert process.stderr is not None
        watch.start(process.pid)
        try:
            for line in process.stderr:
                if text := line.rstrip():
                    log(text)
                    lines = [*lines[1 - LINES_KEPT :], text]
            process.wait()
        finally:
            watch.close()
    excess = watch.excess or (too_much(limits.size_bytes, "bytes") if any(_EFBIG in line for line in lines) else "")
    if excess:
        raise BuildFailed(f"{what}: {excess}", hint=TOO_MUCH_HINT)
    if process.returncode:
        raise BuildFailed(
            f"{what}: {sentence_of(lines) or f'uv ended with {process.returncode}'}",
            hint="nothing was changed; the lines above are uv's log",
        )


def _in_child(limits: UnpackLimits) -> Callable[[], None]:
    """A function for the child, before it becomes uv: ends it with this process, and bounds its files. One that grows
    too large is an error for uv, not its end: it removes what it has unpacked."""
    end_with_parent = kill_with_parent(os.getpid())

    def arm() -> None:
        end_with_parent()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        most = limits.size_bytes + 1 if hard == resource.RLIM_INFINITY else min(limits.size_bytes + 1, hard)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))

    return arm


def sentence_of(lines: Sequence[str]) -> str:
    """What uv says of a failure, in one line: from its first × or `error:` on, without frames."""
    begin = next((i for i, line in enumerate(lines) if line.lstrip().startswith(("×", "error:"))), None)
    chosen = lines[begin:] if begin is not None else [line for line in lines if not line.startswith(_NOISE)][-5:]
    words = " ".join(_FRAME.sub("", line).strip() for line in chosen).split()
    text = " ".join(words).removeprefix("error: ")
    return text if len(text) <= SENTENCE_MAX else text[:SENTENCE_MAX] + "…"
