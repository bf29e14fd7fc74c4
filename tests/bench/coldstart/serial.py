"""Cold start without overlap, of our own parts: fetch everything, start a worker, load, compute, one after another.

On one host of the bed, over the same link. The node's memory is made before the clock starts and no gateway is asked:
both are in its favour. Its worker is a fresh process, as without a warm fork server.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import msgspec

from tests.bench.coldstart.fleet import CALL_S, PROMPT, Fleet
from tests.bench.coldstart.models import Model
from tests.bench.harness.range_server import credentials
from tests.bench.harness.samples import ROOT
from tests.bench.weights import ours
from tests.testbed.bed import BUCKET


def serial_start(fleet: Fleet, model: Model) -> dict[str, Any]:
    """`ttft_s`, and of it the seconds of each step in its turn."""
    spec = fleet.bed.info(model.name).spec
    env = {**credentials(fleet.bed.store_url), "no_proxy": "*", "NO_PROXY": "*"}
    size_bytes = fleet.size_bytes(model)
    with ours.node(f"s3://{BUCKET}", size_bytes, env=env, entered=fleet.entered) as node:
        assert spec.weights is not None
        assert spec.llm is not None
        question = {
            "socket": str(node.socket),
            "checkpoint": spec.weights,
            "settings": msgspec.to_builtins(spec.llm),
            "threads": os.cpu_count(),
            "prompt": PROMPT,
        }
        argv = [sys.executable, "-m", "tests.bench.coldstart.worker", json.dumps(question)]
        began_ns = time.monotonic_ns()
        node.fill(spec.weights)
        fetched_ns = time.monotonic_ns()
        done = subprocess.run(fleet.entered(argv), cwd=ROOT, capture_output=True, text=True, timeout=CALL_S)
    if done.returncode:
        raise RuntimeError(f"the worker ended with {done.returncode}: {done.stderr[-2000:]}")
    answer = json.loads(done.stdout)
    stamps = {"fetch": fetched_ns, **answer["ended"]}
    before_ns, steps = began_ns, {}
    for name, ended_ns in stamps.items():
        steps[name] = (ended_ns - before_ns) / 1e9
        before_ns = ended_ns
    return {"ttft_s": (before_ns - began_ns) / 1e9, "steps_s": steps, "text": answer["text"]}
