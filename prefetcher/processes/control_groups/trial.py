"""`python -m fleetstart.prefetcher.processes.control_groups.trial`: tries whether a node can make control groups here,
as it does at its start; prints their kind, and nothing if it can make none.

`fs doctor` runs it as a process, since the command line imports nothing of nodes. It leaves no group, and other nodes'
groups alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ..epoch import new_epoch
from .setup import make_cgroups, read_hierarchies


def main() -> int:
    own = Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text()
    made = make_cgroups(new_epoch("trial"), read_hierarchies(*own))
    if made is not None:
        print(made.name)
        made.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
