"""Functions inside gVisor: what they see, and that they are served as all others."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from fleetstart.prefetcher.workers.sandboxes import GVISOR_BYTES
from tests.e2e.checkpoints import write_safetensors
from tests.e2e.isolation.consumption import assert_consumption_is_metered, assert_processors_are_limited
from tests.e2e.isolation.gvisor import HEAD, ONE, gvisor_system
from tests.e2e.systems import System
from tests.servers import wait_until

pytestmark = pytest.mark.isolations("namespaces", why="its functions name their own isolation")

ROOT = Path(__file__).parents[3]
CASE = json.loads((ROOT / "tests" / "runtime" / "llm" / "golden.json").read_text())["cases"][0]


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with gvisor_system() as system:
        yield system


CALLS = """
@function(ONE)
def inner(text: str) -> int:
    return len(text)

@function(ONE, calls=["inner"])
def outer(text: str) -> list:
    from fleetstart.runtime import call
    return [call("inner", text=text), platform.release()]
"""


SEES = """
@function(ONE)
def sees(home: str, redis: str, port: int):
    def tried(action):
        try:
            action()
        except OSError as error:
            return type(error).__name__

    def writable(folder):
        return tried(lambda: open(folder + "/fs-was-here", "w").close()) is None

    folders = ("/", "/etc", "/usr", "/root", "/opt", "/dev", "/proc", "/sys", os.path.dirname(os.__file__))
    lines = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    return {
        "kernel": platform.uname().release,
        "boot": open("/proc/version").read(),
        "root": sorted(os.listdir("/")),
        "etc": sorted(os.listdir("/etc")),
        "home": tried(lambda: os.listdir(home)),
        "redis": tried(lambda: socket.socket(socket.AF_UNIX).connect(redis)),
        "gateway": tried(lambda: socket.create_connection(("127.0.0.1", port), timeout=2)),
        "outside": tried(lambda: socket.create_connection(("192.0.2.1", 80), timeout=2)),
        "pids": sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()),
        "writable": [folder for folder in folders if writable(folder)],
        "tmp": writable("/tmp") and writable("/dev/shm"),
        "rights": {lines[name].strip() for name in ("CapInh", "CapPrm", "CapEff", "CapBnd")},
        "environ": [name for name in os.environ if name.startswith("FS_")],
        "folder": os.getcwd(),
    }
"""


def test_it_has_a_kernel_of_its_own_and_sees_nothing_of_the_node(system: System) -> None:
    system.deploy(HEAD + SEES.replace("ONE", ONE), name="sees")
    port = int(system.url.rpartition(":")[2])
    asked = {"home": str(system.home), "redis": str(system.home / "run" / "redis.sock"), "port": port}
    seen: dict[str, Any] = system.ok("sees", asked)
    assert seen["kernel"] != os.uname().release
    assert seen["boot"] != Path("/proc/version").read_text()
    assert not {"home", "var", "run", "boot", "srv", "mnt"} & set(seen["root"])
    assert not {"shadow", "sudoers", "ssh"} & set(seen["etc"])
    assert (seen["home"], seen["redis"]) == ("FileNotFoundError", "FileNotFoundError")
    assert seen["gateway"] is not None
    assert seen["outside"] is not None
    assert seen["pids"] == [1]
    assert seen["writable"] == ["/dev"], "which is its own, and in memory"
    assert seen["tmp"]
    assert set(seen["rights"]) == {"0" * 16}
    assert seen["environ"] == []
    assert seen["folder"] == "/tmp/function"
    (worker,) = system.info("sees").workers
    assert worker.isolation == "gvisor"


def test_it_calls_other_functions(system: System) -> None:
    system.deploy_file(system.source(HEAD + CALLS.replace("ONE", ONE), folder="calls"), "--no-probe")
    length, kernel = system.ok("outer", {"text": "four"})
    assert length == 4
    assert kernel != os.uname().release


REACHES = """
@function(ONE, network=True)
def reaches(name: str, port: int):
    with socket.create_connection((name, port), timeout=5) as connection:
        return connection.recv(100).decode()
"""


def test_the_nodes_network_is_there_for_who_asks_for_it(system: System) -> None:
    system.deploy(HEAD + REACHES.replace("ONE", ONE), name="reaches")
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        server.settimeout(30)

        def greet() -> None:
            with server.accept()[0] as connection:
                connection.sendall(b"well met")

        greeting = pool.submit(greet)
        assert system.ok("reaches", {"name": "localhost", "port": server.getsockname()[1]}) == "well met"
        greeting.result()


APP = """
async def app(scope, receive, send):
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": message["text"][::-1]})
        return
    if scope["type"] != "http":
        return
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"].endswith("/stays"):
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        print("heard", (await receive())["type"])
        return
    for begin in range(0, len(body), 65536):
        await send({"type": "http.response.body", "body": body[begin:begin + 65536], "more_body": True})
    await send({"type": "http.response.body", "body": b""})

echo = function(ONE)(app)
"""


def test_bytes_streams_sockets_and_leavings_pass_as_they_do_elsewhere(system: System) -> None:
    system.deploy(HEAD + APP.replace("ONE", ONE), name="echo")
    data = os.urandom(3 << 20)
    for _ in range(3):  # the same connection to the worker again
        assert system.http.post("/fn/echo/back", content=data).content == data
    with connect(system.url.replace("http", "ws") + "/fn/echo/ws", proxy=None) as ws:
        for text in ("abc", "x" * 100_000):
            ws.send(text)
            assert ws.recv(timeout=20) == text[::-1]
    with system.http.stream("GET", "/fn/echo/stays") as response:
        assert next(response.iter_raw()) == b"begun"
    wait_until(lambda: any("heard http.disconnect" in line.text for line in system.logs("echo")), what="the leaving")


WEIGHTS = """
import torch

@function(name="holds", weights="./weights", isolation="gvisor", memory="512MiB", scale=Scale(max=2, keep_alive_s=600))
class Holds:
    def load(self, weights):
        self.weights = weights
        self.total = sum(float(tensor.double().sum()) for tensor in weights.values())

    def __call__(self, nap_s: float = 0.0):
        time.sleep(nap_s)
        tensor = next(iter(self.weights.values()))
        read, write = os.pipe()
        written = os.write(write, memoryview(tensor.numpy()).cast("B")[:4096])
        try:
            tensor.add_(1)
            changed = float(tensor[0])
        except RuntimeError as error:
            changed = str(error)
        return {"total": self.total, "written": written, "changed": changed, "broken_in": self.broken_in()}

    def broken_in(self):
        # Through what the node gave it, opened anew for writing.
        done = []
        for number in os.listdir("/proc/self/fd"):
            try:
                if not os.readlink("/proc/self/fd/" + number).startswith("host:"):
                    continue
                if os.fstat(int(number)).st_size in (0, 4096):  # 4096: the page in which the worker notes its calls
                    continue
                again = os.open("/proc/self/fd/" + number, os.O_RDWR)
            except OSError:
                continue
            for write in (lambda: os.pwrite(again, b"x", 0), lambda: os.ftruncate(again, 0)):
                try:
                    done.append(write())
                except OSError:
                    done.append("refused")
        return done
"""
TENSORS, TENSOR_BYTES = 24, 1 << 20


def test_weights_are_streamed_into_it_and_shared_with_others(system: System) -> None:
    handler = system.source(HEAD + WEIGHTS, folder="holds")
    write_safetensors(handler.parent / "weights" / "model.safetensors", tensors=TENSORS, tensor_bytes=TENSOR_BYTES)
    system.deploy_file(handler, "--no-probe")
    response = system.call("holds")
    assert response.headers["fs-start"] == "cold"
    total = sum(range(TENSORS)) * (TENSOR_BYTES // 4)
    seen = response.json()
    assert set(seen.pop("broken_in")) == {"refused"}, "of its weights' control block, at least"
    assert seen == {"total": total, "written": 4096, "changed": 1.0}
    checkpoint = system.info("holds").spec.weights
    system.fs("scale", "holds", "--min", "2")
    wait_until(lambda: len([w for w in system.info("holds").workers if w.state == "ready"]) == 2, 60, what="a second")

    def states() -> list[str]:
        return [one.state for one in system.status().nodes[0].segments if one.checkpoint == checkpoint]

    wait_until(lambda: states() == ["ready"], what="one segment for both")
    assert system.ok("holds")["total"] == total, "a write is the writer's own"


def test_a_language_model_gives_its_golden_answer(system: System) -> None:
    weights = ROOT / "examples" / "chat" / "weights"
    if not (weights / "model.safetensors").exists():
        pytest.skip("examples/chat/weights is not there: `make models` makes it")
    text = (ROOT / "examples" / "chat" / "handler.py").read_text().replace("LLM(", 'LLM(isolation="gvisor", ')
    handler = system.source(text, folder="chat")
    (handler.parent / "weights").symlink_to(weights)
    system.deploy_file(handler)
    messages = [{"role": "user", "content": CASE["prompt"]}]
    body = {"messages": messages, "max_tokens": 16, "temperature": 0, "stream": True}
    deltas = []
    with system.http.stream("POST", "/fn/chat/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith('data: {"id"'):
                choices = json.loads(line[6:])["choices"]
                deltas += [choice["delta"].get("content") or "" for choice in choices]
    said = "".join(deltas)
    assert said
    assert str(CASE["output_text"]).startswith(said)
    wait_until(lambda: "inside gvisor" in system.fs("explain", "chat", code=None).out, what="the call's trace")


def test_what_it_used_is_in_its_rows(system: System) -> None:
    assert_consumption_is_metered(system, "gvisor", own_bytes=GVISOR_BYTES)


def test_its_processes_together_get_the_processors_that_a_worker_may_have(system: System) -> None:
    assert_processors_are_limited(system, "gvisor", 1.0)


def test_a_shell_inside_it(system: System) -> None:
    system.deploy(HEAD + SEES.replace("ONE", ONE).replace("sees", "looked"), name="looked")
    ran = json.loads(system.fs("shell", "looked", "--json", "--", "sh", "-c", "uname -r; pwd; ls; tty").out)
    kernel, folder, *files, _ = ran["stdout"].splitlines()
    assert kernel != os.uname().release
    assert (folder, files) == ("/tmp/function", ["handler.py"])
