"""The `fs` command line: a client of the management API. Nothing heavy is imported before it is needed.

`fs up` alone starts processes: the supervisor (`local/supervisor.py`) owns Redis, controller and node daemon of one
machine. Deploying reads handlers by their syntax tree and never runs them (`handler/source/`).
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

__all__ = ["main"]


def main() -> None:
    """Runs the command line that the process was given, and ends the process.

    A verb's imports take some tenths of a second. A KeyboardInterrupt in the middle of one is a traceback, or is lost
    in a callback that ignores exceptions; so ctrl-C ends the process at once, until the verb is there (`root`).
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else the caller's shell ignores it
        signal.signal(signal.SIGINT, end_at_once)
    from .root import main as run_root

    run_root()


def end_at_once(number: int, frame: object) -> NoReturn:
    """Signal handler: ends the process with the exit code of a command that was interrupted."""
    os._exit(128 + number)
