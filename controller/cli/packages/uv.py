"""Runs uv: its log goes to the caller line by line, its failure becomes one sentence."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fleetstart.runtime.contract.errors import BuildFailed
from fleetstart.runtime.contract.process.parent_death import kill_with_parent

LINES_KEPT = 60
"""Last lines of a log of which the sentence is made: uv explains a conflict in fewer."""
SENTENCE_MAX = 2000
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
    arguments: Sequence[str], env: Mapping[str, str], cwd: Path, log: Callable[[str], object], what: str
) -> None:
    """Runs uv to its end, or to that of this process, however it comes. `what` is what it was to do. Errors:
    BuildFailed with uv's own sentence."""
    lines: list[str] = []
    with subprocess.Popen(
        [find_uv(), *arguments],
        env=dict(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        preexec_fn=kill_with_parent(os.getpid()),
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if text := line.rstrip():
                log(text)
                lines = [*lines[1 - LINES_KEPT :], text]
    if process.returncode:
        raise BuildFailed(
            f"{what}: {sentence_of(lines) or f'uv ended with {process.returncode}'}",
            hint="nothing was changed; the lines above are uv's log",
        )


def sentence_of(lines: Sequence[str]) -> str:
    """What uv says of a failure, in one line: from its first × or `error:` on, without frames."""
    begin = next((i for i, line in enumerate(lines) if line.lstrip().startswith(("×", "error:"))), None)
    chosen = lines[begin:] if begin is not None else [line for line in lines if not line.startswith(_NOISE)][-5:]
    words = " ".join(_FRAME.sub("", line).strip() for line in chosen).split()
    text = " ".join(words).removeprefix("error: ")
    return text if len(text) <= SENTENCE_MAX else text[:SENTENCE_MAX] + "…"
