"""The limit of open files is raised as far as it may be, and never lowered."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource
from fleetstart.runtime.contract.process import descriptors
descriptors.DESCRIPTORS_MAX = 600  # the machine's own hard limit may be below the real one
descriptors.raise_descriptor_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "raised"), [(256, 512, "512 512"), (256, 1024, "600 1024"), (700, 1024, "700 1024")]
)
def test_it_is_raised_and_never_lowered(soft: int, hard: int, raised: str) -> None:
    argv = ["prlimit", f"--nofile={soft}:{hard}", sys.executable, "-c", SCRIPT]
    assert subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout.strip() == raised
