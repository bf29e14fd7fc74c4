from __future__ import annotations

import subprocess
import sys

STARTED = """
import ssl
from fleetstart.controller.http.quick_import import import_aiohttp
import_aiohttp()
from aiohttp import connector
print(connector._SSL_CONTEXT_VERIFIED.get_ca_certs(), connector._SSL_CONTEXT_VERIFIED.verify_mode.name)
print("set_default_verify_paths" in vars(ssl.SSLContext))
"""


def test_a_request_that_brings_no_certificates_trusts_no_server() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", STARTED], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[] CERT_REQUIRED", "False"]
