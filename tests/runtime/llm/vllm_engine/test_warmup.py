"""The fork server's warm-up for vLLM: what it waits for, and what of vLLM it counts on."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest

THREADS = """
import os, threading, time
from fleetstart.runtime.llm.vllm_engine import warmup
stop = threading.Event()
threading.Thread(target=stop.wait, daemon=True).start()
looking = threading.Thread(target=stop.wait, args=(1.5,))
looking.start()
began = time.monotonic()
warmup._wait_for_threads(began + 60)
print(looking.is_alive(), time.monotonic() - began < 30)
"""


@pytest.mark.slow
def test_threads_that_end_are_waited_for_and_others_are_not() -> None:
    ran = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=120)
    assert ran.stdout.split() == ["False", "True"], ran.stderr[-2000:]


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make vllm-test")
def test_vllm_still_tries_its_sampler_where_ours_takes_its_place() -> None:
    runner = import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    assert callable(runner._dummy_sampler_run)
