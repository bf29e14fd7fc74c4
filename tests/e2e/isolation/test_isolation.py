"""Isolation of functions: a worker sees its own files and processes, and nothing of the platform's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from fleetstart.runtime.worker.device_binding import DEVICES_VARIABLE
from tests.e2e.isolation.consumption import assert_consumption_is_metered, assert_processors_are_limited
from tests.e2e.isolation.escapes import (
    ATTEMPTS,
    BOMBS,
    defused,
    deploy_escapes,
    heard_outside,
    reaches_the_node,
    try_escapes,
)
from tests.e2e.isolation.hostile import BUNDLES, LAYERS, assert_a_bundle_is_refused, assert_a_layer_is_refused
from tests.e2e.systems import System, running
from tests.servers import wait_until

pytestmark = pytest.mark.isolations(
    "namespaces", why="the others have suites of their own: test_container.py, test_gvisor.py"
)

PEEK = '''
import ctypes, glob, os, socket
from fleetstart.runtime import Scale, function

FOLDERS = ("/", "/etc", "/usr", "/var", "/root", "/run", "/dev", "/proc", "/sys", "/sys/fs/cgroup")


def tried(action):
    """None if it worked, else what the kernel said."""
    try:
        action()
    except OSError as error:
        return type(error).__name__
    return None


def connect(path):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)


def reach(host, port):
    with socket.create_connection((host, port), timeout=2):
        pass


def writable(folder):
    return tried(lambda: open(os.path.join(folder, "fs-was-here"), "w").close()) is None


def status(name):
    for line in open("/proc/self/status"):
        if line.startswith(name + ":"):
            return line.split(":")[1].strip()


@function(memory="128MiB", scale=Scale(max=1, keep_alive_s=60))
def peek(home: str, redis: str, port: int):
    libc = ctypes.CDLL(None, use_errno=True)
    return {
        "home": tried(lambda: os.listdir(home)) or os.listdir(home),
        "redis": tried(lambda: connect(redis)),
        "gateway": tried(lambda: reach("127.0.0.1", port)),
        "outside": tried(lambda: reach("192.0.2.1", 80)),
        "interfaces": [name for _, name in socket.if_nameindex()],
        "pids": sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()),
        "hostname": socket.gethostname(),
        "writable": [folder for folder in (*FOLDERS, os.path.dirname(os.__file__)) if writable(folder)],
        "bundle": writable(os.getcwd()),
        "tmp": writable("/tmp"),
        "shm": writable("/dev/shm"),
        "capabilities": {name: status(name) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")},
        "no_new_privileges": status("NoNewPrivs"),
        "seccomp": status("Seccomp"),
        "mount": libc.mount(b"none", b"/tmp", b"tmpfs", 0, None),
        "unshare": libc.unshare(0x10000000),
        "ptrace": libc.ptrace(16, os.getppid(), 0, 0),
        "environ": sorted(os.environ),
        "descriptors": [os.readlink(path) for path in glob.glob("/proc/self/fd/*") if os.path.islink(path)],
        "groups": [path for path in glob.glob("/sys/fs/cgroup/**/", recursive=True) if writable(path)],
    }
'''


def require_namespaces(system: System) -> None:
    """A node knows what its machine gives once a fork server of it is warm: before that it says nothing."""
    wait_until(lambda: system.status().nodes[0].profiles, 60, what="a warm fork server")
    if not system.status().nodes[0].isolation:
        pytest.skip("this machine refuses namespaces, and FS_ISOLATION=best-effort allows plain processes")


@pytest.fixture(scope="module")
def seen(system: System) -> dict[str, Any]:
    require_namespaces(system)
    system.deploy(PEEK, name="peek")
    port = int(system.url.rpartition(":")[2])
    return dict(
        system.ok("peek", {"home": str(system.home), "redis": str(system.home / "run" / "redis.sock"), "port": port})
    )


def test_it_cannot_see_the_platforms_files(seen: dict[str, Any]) -> None:
    assert seen["home"] in ("FileNotFoundError", "PermissionError", [])


def test_it_cannot_reach_redis_the_gateway_or_the_network(seen: dict[str, Any]) -> None:
    assert seen["redis"] is not None
    assert seen["gateway"] is not None
    assert seen["outside"] is not None
    assert seen["interfaces"] == ["lo"]


def test_it_sees_no_other_process(seen: dict[str, Any]) -> None:
    assert seen["pids"] == [1]


def test_it_writes_to_its_own_temporary_folders_alone(seen: dict[str, Any]) -> None:
    assert seen["writable"] == []
    assert seen["bundle"] is False
    assert seen["tmp"] is True
    assert seen["shm"] is True


def test_it_has_no_capabilities_and_gets_none(seen: dict[str, Any]) -> None:
    assert set(seen["capabilities"].values()) == {"0" * 16}
    assert seen["no_new_privileges"] == "1"
    assert seen["seccomp"] == "2"
    assert (seen["mount"], seen["unshare"], seen["ptrace"]) == (-1, -1, -1)


def test_its_environment_and_descriptors_tell_nothing(seen: dict[str, Any]) -> None:
    assert {name for name in seen["environ"] if name.startswith("FS_")} <= {DEVICES_VARIABLE}, (
        "its own devices, at most"
    )
    allowed = ("socket:", "pipe:", "anon_inode:", "/dev/null", "/proc/", "/memfd:fleetstart-entered-calls")
    assert not [target for target in seen["descriptors"] if not target.startswith(allowed)]
    assert seen["groups"] == []


def test_two_workers_see_nothing_of_each_other(system: System) -> None:
    text = """
    import os
    from fleetstart.runtime import Scale, function

    @function(memory="64MiB", scale=Scale(max=1, keep_alive_s=60))
    def NAME(leave: bool = False):
        if leave:
            for folder in ("/tmp", "/dev/shm"):
                open(folder + "/left", "w").write("here")
        return [folder for folder in ("/tmp", "/dev/shm") if os.path.exists(folder + "/left")]
    """
    system.deploy(text.replace("NAME", "left"), name="left")
    system.deploy(text.replace("NAME", "right"), name="right")
    assert system.ok("left", {"leave": True}) == ["/tmp", "/dev/shm"]
    assert system.ok("right") == []


# ── out of a worker ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def escapes(system: System) -> str:
    """Name of a function that tries to get out."""
    require_namespaces(system)
    return deploy_escapes(system, "namespaces")


@pytest.fixture(scope="module")
def tried(system: System, escapes: str) -> dict[str, Any]:
    return try_escapes(system, escapes)


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_an_attempt_to_get_out_is_refused(tried: dict[str, Any], attempt: str) -> None:
    assert tried[attempt] == "refused"


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_harms_its_own_worker_alone(system: System, escapes: str, bomb: str) -> None:
    assert defused(system, escapes, bomb) in BOMBS[bomb]
    assert system.ok("well", {"name": "Ada"}) == {"well": "Ada"}


def test_a_port_of_a_worker_is_not_open_on_the_machine(system: System, escapes: str) -> None:
    assert not heard_outside(system, escapes)


def test_the_socket_of_a_worker_reaches_nothing_on_the_machine(system: System) -> None:
    assert not reaches_the_node(system, "namespaces")


@pytest.mark.parametrize("kind", BUNDLES)
def test_a_hostile_bundle_is_refused(system: System, kind: str) -> None:
    assert_a_bundle_is_refused(system, "namespaces", kind)


@pytest.mark.parametrize("path", LAYERS)
def test_a_hostile_layer_is_refused(system: System, path: str) -> None:
    assert_a_layer_is_refused(system, "namespaces", path)


def test_what_it_used_is_in_its_rows(system: System) -> None:
    require_namespaces(system)
    assert_consumption_is_metered(system, "namespaces")


def test_its_processes_together_get_the_processors_that_a_worker_may_have() -> None:
    with running(env={"FS_PROFILES": "python", "FS_CPU_LIMIT": "0.5"}) as system:
        require_namespaces(system)
        assert_processors_are_limited(system, "namespaces", 0.5)


# ── out into what a list names ─────────────────────────────────────────────────────────────────────

REACH = """
import http.client, os, socket, urllib.error, urllib.request

import httpx
from fleetstart.runtime import Scale, function

@function(memory="128MiB", network=["127.0.0.2:PORT", "api.example.com"], scale=Scale(max=1, keep_alive_s=60))
def reach(url: str, port: int):
    proxy = os.environ["HTTPS_PROXY"].rpartition(":")[2]
    tunnel = http.client.HTTPConnection("127.0.0.1", int(proxy), timeout=20)
    tunnel.set_tunnel("127.0.0.2", port)
    tunnel.request("POST", "/tunnel", body=b"x" * 100_000)
    try:
        socket.create_connection(("127.0.0.2", port), timeout=2).close()
        around = "connected"
    except OSError as error:
        around = type(error).__name__
    try:
        httpx.get("https://evil.example/")
        refused = ""
    except httpx.ProxyError as error:
        refused = str(error)
    return {
        "tunnel": tunnel.getresponse().read().decode(),
        "urllib": urllib.request.urlopen(url, timeout=20).read().decode(),
        "httpx": httpx.post(url, content=b"y" * 1000).text,
        "around": around,
        "refused": refused,
        "refused_plain": httpx.get("http://127.0.0.3/").status_code,
        "interfaces": [name for _, name in socket.if_nameindex()],
    }
"""


class Echo(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        answer = f"{self.command} {self.path} {len(body)}".encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def outside() -> Iterator[int]:
    """A server on this machine, whose loopback is another than a worker's; its port."""
    server = ThreadingHTTPServer(("127.0.0.2", 0), Echo)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.isolations("namespaces", "container", why="functions inside gVisor have no lists of what they reach")
def test_it_reaches_what_its_list_names_and_nothing_else(system: System, outside: int) -> None:
    require_namespaces(system)
    system.deploy(REACH.replace("PORT", str(outside)), name="reach")

    said = system.ok("reach", {"url": f"http://127.0.0.2:{outside}/plain", "port": outside})

    assert said["tunnel"] == "POST /tunnel 100000"
    assert said["urllib"] == "GET /plain 0"
    assert said["httpx"] == "POST /plain 1000"
    assert said["around"] != "connected"
    assert said["refused"].startswith("403 Forbidden: evil.example:443 is not in the list; this function may reach:")
    assert said["refused_plain"] == 403
    assert said["interfaces"] == ["lo"]
    wait_until(lambda: refusals(system) == 2, what="two refusals in the log")
    system.ok("reach", {"url": f"http://127.0.0.2:{outside}/again", "port": outside})
    assert refusals(system) == 2
    system.fs("rm", "reach", "--yes")
    wait_until(lambda: carried(system, "sent_bytes") > 200_000, what="the bytes that it sent, in its rows")
    assert 0 < carried(system, "received_bytes") < 20_000


def carried(system: System, column: str) -> int:
    return sum(getattr(row, column) or 0 for row in system.phases("reach"))


def refusals(system: System) -> int:
    return sum("this function may reach" in line.text for line in system.logs("reach") if line.stream == "system")
