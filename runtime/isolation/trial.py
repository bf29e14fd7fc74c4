"""`python -m fleetstart.runtime.isolation.trial`: tries whether workers can be confined in namespaces here, as a node
does at its start; prints what the kernel refused, and nothing if it refused nothing.

`fs doctor` runs it as a process, since the command line imports nothing of workers.
"""

from __future__ import annotations

import os
import sys
import tempfile

from .namespaces import probe


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="fs-trial-") as folder:
        granted, _ = probe(os.environ.get("LD_LIBRARY_PATH", ""), folder, 0)
    if granted.refused:
        print(granted.refused)
    return 0


if __name__ == "__main__":
    sys.exit(main())
