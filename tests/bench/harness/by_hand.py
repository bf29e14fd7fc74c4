"""Models started by hand: `vllm serve`, and a script with transformers. What a platform is compared with."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench.harness.wire import Connection
from tests.servers import free_port

READY_S = 600.0
POLL_S = 0.02
QUIT_S = 30.0
SCRIPT = """
import sys, time
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, text, device, dtype = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device)
inputs = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True,
                                       return_tensors="pt", return_dict=True).to(device)
model.generate(**inputs, max_new_tokens=1, do_sample=False)
print(time.clock_gettime(time.CLOCK_MONOTONIC))
"""


@contextlib.contextmanager
def vllm_serve(model: Path, *flags: str, batch: int = 8) -> Iterator[tuple[int, float]]:
    """`vllm serve` of this Python on a free port, and when it was started; healthy when it comes."""
    port = free_port()
    command = [str(Path(sys.executable).parent / "vllm"), "serve", str(model), "--port", str(port)]
    command += ["--max-model-len", "2048", "--max-num-seqs", str(batch), *flags]
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    # A `vllm serve` that is killed leaves its sockets there.
    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory(prefix="vllm-") as sockets:
        env["VLLM_RPC_BASE_PATH"] = sockets
        began = time.monotonic()
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            while not _healthy(port):
                if process.poll() is not None or time.monotonic() > began + READY_S:
                    log.seek(0)
                    raise RuntimeError(f"vllm serve is not ready: {log.read()[-2000:].decode(errors='replace')}")
                time.sleep(POLL_S)
            yield port, began
        finally:
            process.terminate()  # killed at once, it would leave its shared memory behind
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(QUIT_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _healthy(port: int) -> bool:
    try:
        with Connection("127.0.0.1", port) as connection:
            return connection.get("/health").status == 200
    except OSError:
        return False


def transformers_s(model: Path, text: str, *, device: str = "cpu", dtype: str = "float32") -> float:
    """From the start of a Python to the first token of transformers in it."""
    argv = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(model), text, device, dtype]
    began = time.monotonic()
    ran = subprocess.run(argv, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"transformers gave no token: {ran.stderr[-2000:]}")
    return float(ran.stdout.split()[-1]) - began
