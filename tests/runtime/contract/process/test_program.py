from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, threading, time
from fleetstart.runtime.contract.process.program import run_program

class Freed:
    def __del__(self): print("freed", flush=True)

def late():
    time.sleep(0.05)
    print("a thread")

def main():
    global kept
    kept = Freed()
    atexit.register(print, "at exit")
    threading.Thread(target=late).start()
    print("main")
    {last}

run_program(main)
"""


@pytest.mark.parametrize(
    ("last", "code", "says"),
    [
        ("return 3", 3, ""),
        ("pass", 0, ""),
        ("sys.exit(75)", 75, ""),
        ("sys.exit('no such file')", 1, "no such file"),
        ("raise ValueError('wrong')", 1, "ValueError: wrong"),
    ],
)
def test_a_program_ends_with_its_code_once_its_threads_have_and_frees_nothing(last: str, code: int, says: str) -> None:
    program = PROGRAM.format(last=last)
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split("\n")) == (code, ["main", "a thread", "at exit", ""])
    assert says in done.stderr
