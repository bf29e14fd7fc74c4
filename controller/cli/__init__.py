"""The `fs` command line: what a person types. It talks HTTP to a controller and imports nothing heavy early.

`fs up` is the exception that starts processes: the supervisor (`supervisor.py`) owns Redis, controller and node
daemon of one machine. Deploying reads handlers by their syntax tree and never runs them (`declarations.py`).
"""

from .root import main

__all__ = ["main"]
