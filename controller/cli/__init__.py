"""The `fs` command line: a client of the management API. Nothing heavy is imported before it is needed.

`fs up` alone starts processes: the supervisor (`local/supervisor.py`) owns Redis, controller and node daemon of one
machine. Deploying reads handlers by their syntax tree and never runs them (`handler/source/`).
"""

from .root import main

__all__ = ["main"]
