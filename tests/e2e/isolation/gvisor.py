"""A system whose functions run inside gVisor, and the beginning of their handlers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.systems import System, running
from tests.servers import wait_until

POOLS = "python,torch,python+gvisor,torch+gvisor"
HEAD = """
import asyncio, glob, os, platform, socket, time
from fleetstart.runtime import Scale, function

"""
ONE = 'isolation="gvisor", memory="64MiB", concurrency=4, scale=Scale(max=1, keep_alive_s=600)'


@contextmanager
def gvisor_system() -> Iterator[System]:
    """System that is up, with workers inside gVisor; skips the test where runsc is not installed."""
    if shutil.which("runsc") is None:
        pytest.skip("runsc (gVisor) is not installed")
    with running(env={"FS_PROFILES": POOLS, "FS_CPU_LIMIT": "1"}) as system:
        wait_until(lambda: "torch" in system.status().nodes[0].profiles, 60, what="a warm fork server")
        wait_until(lambda: system.status().nodes[0].isolations, 30, what="a launcher of sandboxes")
        yield system
