"""Reading of Redis' answer to WAITAOF: tells whether the writes before it are on its disk. Pure.

A Redis without an append-only file keeps nothing over a crash, and one before 7.2 cannot say what it keeps: waiting
would change neither, and `fs status` and `fs doctor` tell of both. Any other error is an error: a server that refuses
the command, or a proxy that does not know it as Redis does, has confirmed nothing.
"""

from __future__ import annotations

from typing import Literal

NO_LOG = "appendonly is disabled"
NO_COMMAND = "unknown command"
"""What Redis, Valkey and KeyDB say, in lower case."""

OnDisk = Literal["yes", "not yet", "cannot tell"]


def on_disk(answer: object) -> OnDisk:
    """Errors: the answer itself, if it is an error that says neither that there is no log nor no such command."""
    if isinstance(answer, Exception):
        said = str(answer).lower()
        if NO_LOG in said or said.startswith(NO_COMMAND):
            return "cannot tell"
        raise answer
    local = answer[0] if isinstance(answer, list | tuple) and answer else 0
    return "yes" if local else "not yet"
