"""Client of `forked` and the scripts that serve through it: loads in fresh processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.bench.harness.samples import ROOT
from tests.bench.peers.process import Talk, peer

QUIT_S = 10.0
OUR_WORKER = "tests.bench.weights.ours_worker"
"""Module of our side as a worker."""


class Sample(NamedTuple):
    """`cpu_s` is user and system time of all processes of the loader."""

    ready_s: float
    cpu_s: float


class LoaderFailed(Exception):
    """A loader's error, with its own words."""


class Loaders:
    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self.about = talk.about

    def load(self, loader: str, begin: Callable[[int], object], **question: Any) -> Any:
        """The loader's answer; `begin` gets its process id after all imports, before the clock starts. LoaderFailed."""
        begin(self._ask(do="load", loader=loader, **question)["prepared"])
        return self._ask(go=True)

    def do(self, action: str, **question: Any) -> Any:
        return self._ask(do=action, **question)

    def _ask(self, **question: Any) -> Any:
        answer = self._talk.ask(**question)
        if "error" in answer:
            raise LoaderFailed(answer["error"])
        return answer


@contextlib.contextmanager
def peer_loaders(python: Path | None) -> Iterator[Loaders]:
    """Without a Python of the peers' own: those that ours has, safetensors and torch."""
    with peer(python or Path(sys.executable), Path(__file__).with_name("loaders_peer.py")) as talk:
        yield Loaders(talk)


@contextlib.contextmanager
def module(
    name: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    entered: Callable[[Sequence[str]], Sequence[str]] = tuple,
) -> Iterator[Talk]:
    """A module as a process that answers as a peer does; ended with its input, or else killed.

    `entered` gives the command that runs it somewhere else, such as on a host of a test bed.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            entered([sys.executable, "-m", name, *arguments]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
            env={**os.environ, **(env or {})},
        )
        try:
            yield Talk(process, Path(f"/proc/self/fd/{log.fileno()}"))
        except json.JSONDecodeError as error:
            raise RuntimeError(f"{name} said {error.doc!r}") from error
        finally:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(QUIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
