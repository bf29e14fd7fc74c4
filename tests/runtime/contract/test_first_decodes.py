"""Types that threads decode: the first ones to do so at once get what they decode, and do not crash the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
THREADS, PROCESSES = 8, 4
"""With a decoder that is made at its first use, four of five processes crashed."""
PROGRAM = """
import sys, threading
{imports}
sys.setswitchinterval(1e-6)
ready = threading.Barrier({threads})
found = []

def read():
    ready.wait()
    found.append({read})

threads = [threading.Thread(target=read) for _ in range({threads})]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(found) == {threads} and all(one == found[0] for one in found), found
"""
HELLO = (
    b'{"grant":{"checkpoint":"c","holder":"h","epoch":"e","reader":"r","expires_unix_ms":1},'
    b'"nonce":"AAAA","proof":"AAAA"}'
)
MANIFEST = b'{"total_bytes":0,"chunk_bytes":4096,"parts":[],"tensors":{},"chunks":[]}'
READS = {
    "a grant": ("from fleetstart.prefetcher.peers.frames import read_hello", f"read_hello({HELLO!r})"),
    "a manifest": (
        "from fleetstart.runtime.contract.weights.manifest import decode_manifest",
        f"decode_manifest({MANIFEST!r})",
    ),
    "an answer": (
        "from fleetstart.runtime.contract.call_format import decode_value\n"
        "from tests.runtime.contract.answers import Outer",
        """decode_value("f", "application/json", b'{"inner":{"a":"x","b":[1]}}', Outer)""",
    ),
    "an error": (
        "from fleetstart.runtime.contract.call_format import decode_error",
        """str(decode_error(404, b'{"error":{"code":"not_found","message":"gone"}}'))""",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READS)
def test_threads_that_are_the_first_to_decode_a_type_do_not_crash(name: str) -> None:
    imports, read = READS[name]
    program = PROGRAM.format(imports=imports, read=read, threads=THREADS)
    running = [
        subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, cwd=ROOT) for _ in range(PROCESSES)
    ]
    ended = [(process.communicate()[1].decode(), process.returncode) for process in running]
    assert ended == [("", 0)] * PROCESSES
