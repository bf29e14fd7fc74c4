"""BentoML or LitServe as the peer, in a Python of its own: serves `hello` from one worker, as it does by default.

Run by `peer.py`, never by hand. The first line that it says tells what it is; the end of its input is its end.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

BOOT_S = 90.0
QUIT_S = 20.0

LITSERVE = """
import sys
import litserve

class Hello(litserve.LitAPI):
    def setup(self, device):
        pass

    def decode_request(self, request):
        return request.get("name", "world")

    def predict(self, name):
        return {"message": f"Hello, {name}!"}

    def encode_response(self, output):
        return output

if __name__ == "__main__":
    server = litserve.LitServer(Hello(api_path="/hello"), accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), log_level="error", generate_client_file=False)
"""
BENTOML = """
import bentoml

@bentoml.service(workers=1)
class Hello:
    @bentoml.api
    def hello(self, name: str = "world") -> dict[str, str]:
        return {"message": f"Hello, {name}!"}
"""


def argv(which: str, folder: Path, port: int) -> list[str]:
    if which == "litserve":
        (folder / "serve_hello.py").write_text(LITSERVE)
        return [sys.executable, "serve_hello.py", str(port)]
    (folder / "hello_service.py").write_text(BENTOML)
    options = ["--host", "127.0.0.1", "--port", str(port)]
    return [sys.executable, "-m", "bentoml", "serve", "hello_service:Hello", *options]


def answers(port: int) -> bool:
    body = json.dumps({"name": "you"}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/hello", data=body, headers={"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status == 200 and json.load(answer) == {"message": "Hello, you!"}
    except OSError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--which", choices=("bentoml", "litserve"), required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--temp-dir", type=Path, required=True)
    options = parser.parse_args()
    began_s = time.monotonic()
    env = {**os.environ, "BENTOML_DO_NOT_TRACK": "true", "BENTOML_HOME": str(options.temp_dir / "bentoml")}
    server = subprocess.Popen(
        argv(options.which, options.temp_dir, options.port),
        cwd=options.temp_dir,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        start_new_session=True,
    )
    try:
        while not answers(options.port):
            if server.poll() is not None or time.monotonic() - began_s > BOOT_S:
                print(f"{options.which} does not answer", file=sys.stderr)
                return 1
            time.sleep(0.1)
        version = importlib.metadata.version(options.which)
        print(json.dumps({options.which: version, "boot_s": round(time.monotonic() - began_s, 1)}), flush=True)
        sys.stdin.read()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(QUIT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit(main())
