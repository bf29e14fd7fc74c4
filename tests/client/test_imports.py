"""The client stands alone: its process needs neither the server's packages nor those of a worker."""

from __future__ import annotations

import subprocess
import sys

LOOK = """
import sys, fleetstart.client
parts = {".".join(name.split(".")[:3]) for name in sys.modules if name.startswith("fleetstart.")}
assert not {part for part in parts if part.split(".")[1] in ("controller", "prefetcher", "native")}, parts
assert {part for part in parts if part.startswith("fleetstart.runtime.")} <= {"fleetstart.runtime.contract"}, parts
assert not {"torch", "redis", "aiohttp", "boto3"} & set(sys.modules)
"""


def test_the_client_shares_only_the_contract_with_the_other_parts() -> None:
    subprocess.run([sys.executable, "-c", LOOK], check=True, timeout=30)
