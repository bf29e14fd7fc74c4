from __future__ import annotations

import subprocess
import sys

import pytest

STARTED = """
import sys
from fleetstart.runtime.contract.process.unused_modules import UNUSED, leave_out_unused_modules
leave_out_unused_modules()
import fleetstart.controller.app, fleetstart.prefetcher.daemon
import httpx, redis.asyncio
print(*(name for name in (*UNUSED, "rich.console", "opentelemetry.sdk.metrics._internal") if sys.modules.get(name)))
"""


@pytest.mark.slow
def test_a_controller_and_a_daemon_import_nothing_that_they_never_use() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", STARTED], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
