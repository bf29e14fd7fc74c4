"""`python -m tests.simulation`: runs seeds, and shows those that fail."""

from __future__ import annotations

import os
import sys

if os.environ.get("PYTHONHASHSEED") != "0":
    # The order of a set of strings is part of a run.
    os.execve(
        sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"}
    )

from tests.simulation import processes

processes.install()

from tests.simulation.command import main  # noqa: E402

sys.exit(main())
