"""Bed for chaos: two controllers apart from Redis, two nodes, small disks, clocks that can be stepped, and a recorder
of runs that the handler calls before it answers."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.e2e.pipelines.fleet import Fleet
from tests.testbed import Testbed
from tests.testbed.parts import Part

RECORDER = "recorder"
RECORDER_PORT = 9100
DISK = "96m"
"""Size of a part's disk: a Redis that was written to for ten minutes fits, and filling it takes a moment."""
OFFSET_BYTES = 8
MODEL = "chat"
MODEL_TOKENS = 200
"""Some seconds of a small model on a busy machine: most faults find a stream under way."""

HANDLER = """
import json, time, urllib.request
from fleetstart.runtime import Scale, context, function

RECORDER = "http://{recorder}/"

def record(ticket):
    # Waits for the recorder: what is not written down has not happened, and what is answered was written down.
    told = dict(ticket=ticket, request=context.id, version=context.version, attempt=context.attempt)
    with urllib.request.urlopen(RECORDER, data=json.dumps(told).encode(), timeout=5) as answer:
        return json.load(answer)["run"]

@function(memory="64MiB", network=["{recorder}"], concurrency=8, scale=Scale(min=1, max=3, keep_alive_s=600))
def work(ticket: str, nap_s: float = 0.02):
    run = record(ticket)
    time.sleep(nap_s)
    return {{"run": run, "ticket": ticket}}

@function(memory="64MiB", network=["{recorder}"], concurrency=8, scale=Scale(min=1, max=2, keep_alive_s=600))
def count(ticket: str, items: int = 20):
    record(ticket)
    for number in range(items):
        time.sleep(0.02)
        yield f"{{ticket}}-{{number}}"
"""


class ChaosBed(Testbed):
    """A bed of two gateways and two nodes. To be used in a mount namespace of its own: it mounts small disks."""

    def __init__(self, on_run: Callable[[dict[str, object]], int], *, model: bool = False) -> None:
        """`on_run`: writes a run down and gives it a number. `model`: nodes can run a language model, too."""
        profiles = "python,torch" if model else "python"
        super().__init__(
            nodes=2,
            mbit=200,
            controllers=("gateway-0", "gateway-1"),
            others=(RECORDER,),
            env={"FS_PROFILES": profiles, "FS_EGRESS_ALLOW": "10.77.0.0/24", "FS_SEGMENT_ROWS": "2000"},
        )
        self.recorder = f"{self.network.addresses[RECORDER]}:{RECORDER_PORT}"
        self._server = _recorder(self._recorder_socket(), on_run)
        self.disks = {part: part.home for part in (*self.controllers, *self.nodes, self.redis_server)}
        for home in self.disks.values():
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", home], check=True)
        self.clocks = _stepped(self.folder, [*self.controllers, *self.nodes])

    def close(self) -> None:
        for home in self.disks.values():
            subprocess.run(["umount", "--lazy", home], check=False)
        self._server.shutdown()
        self._server.server_close()
        super().close()

    def part_of(self, name: str) -> Part:
        """The part that runs on the host, or Redis, or the store."""
        if name in ("redis", "store"):
            return self.redis_server if name == "redis" else self.store
        return next(part for part in (*self.controllers, *self.nodes) if part.host == name)

    def deploy(self) -> None:
        source = self.folder / "src" / "handler.py"
        source.parent.mkdir()
        source.write_text(HANDLER.format(recorder=self.recorder))
        self.fs("deploy", str(source))

    def deploy_model(self) -> str:
        """Deploys a small language model; returns the text that it writes, of so many tokens."""
        model = Fleet(self, self.folder / "model").deploy(MODEL, "scale=Scale(min=1, max=2, keep_alive_s=600)")
        return model.answer(MODEL_TOKENS)

    def _recorder_socket(self) -> socket.socket:
        made = self.network.socket(RECORDER)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((self.network.addresses[RECORDER], RECORDER_PORT))
        made.listen(256)
        return made


def _recorder(listener: socket.socket, on_run: Callable[[dict[str, object]], int]) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told = json.loads(self.rfile.read(int(self.headers["content-length"])))
            body = json.dumps({"run": on_run(told)}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, address: object) -> None:
            """A connection that a fault broke."""

    server = Server(("", 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def _stepped(folder: Path, parts: list[Part]) -> dict[str, Path]:
    """Gives each part a clock that can be stepped; returns the files of their offsets by host. None without a
    compiler."""
    if shutil.which("cc") is None:
        return {}
    library = folder / "stepped_clock.so"
    source = Path(__file__).with_name("stepped_clock.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    found = {}
    for part in parts:
        offset = folder / f"offset-{part.host}"
        offset.write_bytes(bytes(OFFSET_BYTES))
        part.env = {**part.env, "LD_PRELOAD": str(library), "FS_STEPPED_CLOCK": str(offset)}
        found[part.host] = offset
    return found
