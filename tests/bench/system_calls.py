"""Claim: functions with torch, transformers, onnxruntime and the standard library make no system call that is refused.

Runs what functions run, each in a process of its own without a filter, under strace, and compares the calls with those
that the filter allows. A call that is refused is listed with how often it was made; libraries may live without it.

Run: python -m tests.bench.system_calls [--json FILE]. Needs strace.
"""

from __future__ import annotations

import argparse
import errno
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from fleetstart.runtime.isolation import seccomp

WORKLOADS = {
    "asyncio": "import asyncio; asyncio.run(asyncio.sleep(0)); import uvloop; uvloop.run(asyncio.sleep(0))",
    "threads and processes": (
        "import concurrent.futures as c, multiprocessing as m, subprocess as s; "
        "list(c.ThreadPoolExecutor(4).map(abs, range(9))); s.run('ls | cat', shell=True, stdout=s.DEVNULL); "
        "p = m.get_context('fork').Pool(2); p.map(abs, range(9)); p.close(); p.join()"
    ),
    "sqlite": "import sqlite3; d = sqlite3.connect('/tmp/x.db'); d.execute('pragma journal_mode=wal'); d.close()",
    "shared memory": (
        "from multiprocessing import shared_memory as s; b = s.SharedMemory(create=True, size=9); b.close(); b.unlink()"
    ),
    "http": (
        "import http.server, threading, urllib.request as u, ssl; ssl.create_default_context(); "
        "s = http.server.ThreadingHTTPServer(('127.0.0.1', 0), http.server.SimpleHTTPRequestHandler); "
        "threading.Thread(target=s.serve_forever, daemon=True).start(); "
        "u.urlopen(f'http://127.0.0.1:{s.server_port}/').read(); s.shutdown()"
    ),
    "numpy": "import numpy as n; n.linalg.svd(n.random.rand(300, 300))",
    "scikit-learn": (
        "import numpy as n; from sklearn.ensemble import RandomForestClassifier as R; "
        "R(n_jobs=2).fit(n.random.rand(99, 4), n.arange(99) % 2)"
    ),
    "torch": (
        "import torch; m = torch.nn.Linear(512, 512); "
        "[m(torch.rand(64, 512)).sum().backward() for _ in range(3)]; "
        "from torch.utils.data import DataLoader as D; list(D(list(range(8)), num_workers=2))"
    ),
    "transformers": (
        "import torch; from transformers import BertConfig, BertModel; "
        "c = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64); "
        "BertModel(c)(torch.tensor([[1, 2, 3]]))"
    ),
    "onnxruntime": "import onnxruntime as o; o.get_available_providers(); o.SessionOptions()",
}
_LINE = re.compile(rb"^(?:\[pid +\d+\] |\d+ +)?(\w+)\(", re.MULTILINE)


def calls_of(code: str) -> Counter[str]:
    """System calls that a program makes, its children included. Errors: RuntimeError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace")
        command = ["strace", "-f", "-qq", "-o", str(trace), sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=600)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        return Counter(name.decode() for name in _LINE.findall(trace.read_bytes()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all counts there")
    options = parser.parse_args()
    if shutil.which("strace") is None:
        raise SystemExit("strace is not installed (Debian: apt install strace)")
    verdicts = seccomp.verdicts(platform.machine())
    counts: dict[str, dict[str, int]] = {}
    for name, code in WORKLOADS.items():
        try:
            found = calls_of(code)
        except RuntimeError as error:
            print(f"{name}: not measured: {str(error).splitlines()[-1] if str(error) else 'it failed'}")
            continue
        counts[name] = dict(found)
        refused = {call: (verdicts[call], count) for call, count in found.items() if verdicts.get(call)}
        said = ", ".join(f"{call} ({errno.errorcode[code]}, {count} times)" for call, (code, count) in refused.items())
        print(f"{name}: {len(found)} calls, refused: {said or 'none'}")
    if options.json:
        options.json.write_text(json.dumps(counts, indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
