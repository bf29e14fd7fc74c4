"""Fork server: a process that has imported what workers need, and forks one in milliseconds (`fork_launcher`).

The node daemon starts it (`python -m fleetstart.runtime.launch.forkserver`) with one end of a socketpair. Nothing is
imported before the environment is that of a worker, for which the process may execute itself again.
"""

from __future__ import annotations

import argparse
import os
import sys

from .profiles import PRELOADS, worker_environment


def _reduce_environment() -> None:
    """Executes this program again if its environment holds more than a worker may see.

    Unsetting is not enough: /proc/self/environ shows a process the environment that it was executed with,
    and to a worker that of its fork server.
    """
    wanted = worker_environment(os.environ)
    if dict(os.environ) != wanted:
        # The running binary by its link in /proc: the folders on its path may not be this user's to walk.
        os.execve("/proc/self/exe", [sys.executable, *sys.orig_argv[1:]], wanted)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="fleetstart.runtime.launch.forkserver", description="Forks warm workers.")
    parser.add_argument("--profile", choices=("python", "torch"), required=True)
    parser.add_argument("--preload", choices=tuple(PRELOADS), default="", help="library to import beside the profile's")
    parser.add_argument("--fd", type=int, required=True, help="this side of the socketpair with the daemon")
    parser.add_argument("--hide", action="append", default=[], metavar="DIR", help="folder that no worker may see")
    parser.add_argument(
        "--root", required=True, metavar="DIR", help="empty folder, on which the workers' root is built for them alone"
    )
    parser.add_argument(
        "--share", action="append", default=[], metavar="DIR", help="folder with code, packages, volumes of functions"
    )
    parser.add_argument(
        "--user", type=int, default=0, help="a user id that workers may be told to take; 0: they keep the daemon's"
    )
    parser.add_argument(
        "--isolation",
        choices=("required", "best-effort"),
        default="required",
        help="best-effort: where the kernel refuses namespaces, workers are plain processes",
    )
    options = parser.parse_args(arguments)
    _reduce_environment()
    from .fork_launcher import run

    run(options)


if __name__ == "__main__":
    main()
    os._exit(0)  # nothing is open: Python would free torch module by module, for half a second
