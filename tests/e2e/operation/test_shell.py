"""`fs shell` on a whole system: what it finds, how it ends, and that it leaves nothing."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from fleetstart.controller.shell.service import OPEN_MAX
from fleetstart.runtime.contract.node.shell import FRAME_MAX_BYTES
from tests.e2e.systems import FS, System, isolation, running
from tests.servers import wait_until

pytestmark = pytest.mark.e2e

SLEEP_S = 1_000_000 + os.getpid()
LOOK = """
def look():
    import ctypes, os, resource, socket
    lines = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    mounts = [line.split()[1] for line in open("/proc/self/mounts")]
    return {
        "environment": {name: value for name, value in os.environ.items() if name not in ("PATH", "TERM", "PWD", "_",
                        "SHLVL", "LC_CTYPE", "OMP_NUM_THREADS", "HOSTNAME")},
        "folder": os.getcwd(),
        "files": sorted(name for name in os.listdir() if not name.startswith((".", "__"))),
        "root": sorted(os.listdir("/")),
        "user": [os.getuid(), os.getgid()],
        "rights": [lines.get(name, "").strip() for name in ("CapEff", "CapBnd", "NoNewPrivs", "Seccomp")],
        "limits": [resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_CORE)],
        "interfaces": [name for _, name in socket.if_nameindex()],
        "mounts": sorted(set(mounts) - {"/dev/pts", "/dev/tty"}),
        "first": open("/proc/1/cmdline").read().partition("--origin")[0],
    }
"""
HANDLER = """
from fleetstart.runtime import Scale, function
from look import look

@function(memory="96MiB", secrets=["TOKEN"], scale=Scale(max=1, keep_alive_s=600))
def looks():
    print("looked")
    return look()
"""
HUGE = """
from fleetstart.runtime import function

@function(memory="900GiB")
def huge():
    return 1
"""


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with running(env={"FS_PROFILES": "python"}) as system:
        subprocess.run([*FS, "secret", "set", "TOKEN"], env=system.env, input=b"t0ken", check=True, capture_output=True)
        handler = system.source(HANDLER, folder="looks")
        (handler.parent / "look.py").write_text(LOOK)
        system.deploy_file(handler, "--no-probe")
        # A call waits for a warm fork server; a shell is refused until there is one.
        wait_until(lambda: "python" in [name for node in system.status().nodes for name in node.profiles], 60)
        yield system
        wait_until(lambda: not shells(system), 60, what="the end of all shells")


def shells(system: System) -> list[bytes]:
    """Orders of shells that are still there."""
    with system.redis() as client:
        found: Any = [value for key in client.keys("fs:desired:*") for value in client.hvals(key)]
    return [value for value in found if b'"shell":true' in value]


class Person:
    """`fs shell` at a terminal."""

    def __init__(self, system: System, *arguments: str) -> None:
        self.terminal, theirs = pty.openpty()
        self.resize(31, 97)
        self.before = termios.tcgetattr(theirs)
        self._theirs = theirs
        self.process = subprocess.Popen(
            [*FS, "shell", *arguments], env={**system.env, "TERM": "xterm"}, stdin=theirs, stdout=theirs, stderr=theirs,
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.set_blocking(self.terminal, False)
        self.seen = ""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def sees(self, pattern: str) -> re.Match[str]:
        """Waits for it, and forgets what came before its end."""

        def found() -> re.Match[str] | None:
            with contextlib.suppress(BlockingIOError, OSError):
                while data := os.read(self.terminal, 65536):
                    self.seen += data.decode(errors="replace")
            return re.search(pattern, self.seen)

        try:
            match = wait_until(found, 60)
        except AssertionError:
            raise AssertionError(f"no {pattern!r} in what the terminal shows: {self.seen[-2000:]!r}") from None
        assert match is not None
        self.seen = self.seen[match.end() :]
        return match

    def ended(self) -> int:
        code = self.process.wait(60)
        assert termios.tcgetattr(self._theirs) == self.before, "the terminal is as it was"
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.terminal)
        os.close(self._theirs)


@pytest.fixture
def person(system: System) -> Iterator[Person]:
    person = Person(system, "looks")
    try:
        yield person
    finally:
        person.close()


def test_a_command_finds_what_a_worker_finds(system: System) -> None:
    """A shell before any call: the function has no worker, and gets none by this."""
    program = "import json, look; print(json.dumps(look.look()))"
    ran = json.loads(system.fs("shell", "looks", "--json", "--", "python", "-c", program).out)
    assert (ran["status"], ran["stderr"]) == (0, "")
    assert system.info("looks").workers == []
    found, worker = json.loads(ran["stdout"]), system.ok("looks")
    assert found.pop("environment") == worker.pop("environment") | {"TOKEN": "t0ken"}
    users = [*found.pop("user"), *worker.pop("user")]  # ids of the function, perhaps not the same ones
    assert (0 in users) == (isolation() == "gvisor"), "root inside gVisor, and nobody outside"
    assert found == worker
    assert worker["folder"] == "/tmp/function"
    wait_until(lambda: any("shell ready" in line.text for line in system.logs("looks")), what="a line in the log")
    wait_until(lambda: system.phases("looks", "load"), what="the rows of the worker")
    assert len({row.worker for row in system.phases("looks")}) == 1, "a shell is no part of the bill"


def test_status_and_streams_of_a_command_pass_through(system: System) -> None:
    def run(*command: str, text: bytes = b"") -> tuple[int, bytes, bytes]:
        done = subprocess.run([*FS, "shell", "looks", *command], env=system.env, input=text, capture_output=True)
        return done.returncode, done.stdout, done.stderr

    assert run("--", "sh", "-c", "cat; echo err >&2; exit 7", text=b"x" * 300_000) == (7, b"x" * 300_000, b"err\n")
    assert run(text=b"echo $((6 * 7)); exit 3\n")[:2] == (3, b"42\n"), "without a terminal, a shell reads its commands"
    enough = shlex.join([*FS, "shell", "looks", "--", "yes"]) + " | head -n 2"
    done = subprocess.run(["bash", "-c", enough], env=system.env, capture_output=True)
    assert (done.stdout, done.stderr) == (b"y\ny\n", b"")
    code, _, err = run("--", "python", "-c", "x = bytearray(300 << 20)")
    assert code in (1, 137)
    if code == 1:
        assert b"memory" in err.lower()


@pytest.mark.isolations("namespaces", "container", why="terminals inside gVisor (20221219) send no signals for keys")
def test_a_terminal_with_its_window_its_keys_and_its_end(person: Person) -> None:
    person.sees(r"[#$] $")
    person.type("tty; stty size; echo $TERM\r")
    person.sees(r"/dev/pts/0\r\n31 97\r\nxterm")
    waits = "until stty size | grep -q '^20 60$'; do sleep 0.1; done"
    person.type(f"echo waits $((30 + 1)); {waits}; echo resized $((40 + 1))\r")
    # Only then: around each line bash reads the size and sets it again, and what comes between the two is undone.
    person.sees(r"waits 31")
    person.resize(20, 60)
    os.kill(person.process.pid, signal.SIGWINCH)
    person.sees(r"resized 41")
    person.type(f"sleep {SLEEP_S}; echo after=$?\r")
    person.sees(r"after=.*\n")  # what was typed
    wait_until(lambda: sleeping() == 1, 60, what="the sleeper, whom the key shall end")
    person.type("\x03")
    person.sees(r"\^C")
    person.type("echo still $((40 + 2))\r")
    person.sees(r"still 42")
    assert not sleeping()
    person.type("(exit 5)\r\x04")
    assert person.ended() == 5


@pytest.mark.isolations("namespaces", "container", why="processes inside gVisor are not seen from outside")
def test_nothing_is_left_when_the_client_is_killed(system: System, person: Person) -> None:
    person.sees(r"[#$] $")
    person.type(f"sleep {SLEEP_S} & sleep {SLEEP_S}\r")
    wait_until(lambda: sleeping() == 2, 60, what="the sleepers")
    os.kill(person.process.pid, signal.SIGKILL)
    wait_until(lambda: not sleeping() and not shells(system), 60, what="the end of the session")


def sleeping() -> int:
    """Number of our own sleepers that run, wherever they are."""
    found = 0
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            found += Path(f"/proc/{entry}/cmdline").read_bytes() == b"sleep\0%d\0" % SLEEP_S
    return found


def test_the_terminal_is_put_back_at_a_polite_end(person: Person) -> None:
    person.sees(r"[#$] $")
    person.process.terminate()
    assert person.ended() == 130


def test_it_ends_with_its_time_and_with_its_function(system: System) -> None:
    with opened(system, query="?idle_s=1") as socket:
        socket.send('{"type":"start","argv":["sleep","600"]}')
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(60)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.reason == "nothing was typed or printed for 1 s"
    system.deploy_file(system.source(HANDLER, folder="looks"), "--name", "short")
    shell = Person(system, "short")
    try:
        shell.sees(r"[#$] $")
        system.fs("rm", "short", "--yes")
        shell.sees("function short was removed")
        assert shell.ended() == 1
    finally:
        shell.close()


def test_what_cannot_be_had_is_said(system: System) -> None:
    system.deploy(HUGE, name="huge")
    assert "no node can hold a worker of huge" in system.fs("shell", "huge", "--", "true", code=1).err
    assert "did you mean 'looks'?" in system.fs("shell", "look", "--", "true", code=3).err
    for query, status in (
        ("version=99", 404),
        ("version=prod", 404),
        ("idle_s=0", 400),
        ("idle_s=nan", 400),
        ("idle_s=1e9", 400),
    ):
        with pytest.raises(InvalidStatus) as answer:
            opened(system, query=f"?{query}")
        assert answer.value.response.status_code == status


def opened(system: System, key: str = "", query: str = "") -> ClientConnection:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    url = f"{system.url.replace('http', 'ws')}/api/v1/functions/looks/shell{query}"
    return connect(url, additional_headers=headers, proxy=None, open_timeout=60)


def test_no_more_than_some_are_open_at_a_time(system: System) -> None:
    wait_until(lambda: not shells(system), 60, what="the end of earlier ones")
    with contextlib.ExitStack() as stack:
        for _ in range(OPEN_MAX):
            stack.enter_context(opened(system))
        with pytest.raises(InvalidStatus) as refused:
            opened(system)
        assert refused.value.response.status_code == 429
    wait_until(lambda: not shells(system), 60, what="the end of all of them")


def hear_all(socket: ClientConnection) -> None:
    while True:
        socket.recv(60)


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        (["no json"], 1008),
        (['{"type":"size","rows":0,"columns":10}'], 1008),
        (['{"type":"start","argv":[1]}'], 1008),
        (['{"type":"start","term":"x\\ny"}'], 1008),
        (["[" * 50_000], 1008),
        ([b"input"], 1008),
        (['{"type":"start"}', '{"type":"start"}'], 1008),
        (['{"type":"start"}', b"x" * (FRAME_MAX_BYTES + 1)], 1009),
    ],
)
def test_hostile_frames_end_the_session_and_nothing_else(system: System, frames: list[str | bytes], code: int) -> None:
    with opened(system) as socket:
        for frame in frames:
            socket.send(frame)
        with pytest.raises(ConnectionClosed) as closed:
            hear_all(socket)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == code, closed.value.rcvd.reason


@pytest.mark.isolations("namespaces", "container", why="processes inside gVisor are not seen from outside")
def test_it_ends_with_its_node_which_comes_back(system: System, person: Person) -> None:
    person.sees(r"[#$] $")
    person.type(f"sleep {SLEEP_S}\r")
    wait_until(sleeping, 60, what="the sleeper")
    system.kill(system.one("node"))
    person.sees("the shell has ended")
    assert person.ended() == 1
    wait_until(lambda: not sleeping() and not shells(system), 60, what="the end of the session")

    def again() -> bool:
        return system.fs("shell", "looks", "--", "true", code=None).code == 0

    wait_until(again, 60, what="a shell on the node that came back")


def test_an_order_that_a_killed_controller_left_is_taken_back(system: System, person: Person) -> None:
    person.sees(r"[#$] $")
    system.kill(system.one("controller"))
    person.sees("the shell has ended")
    assert person.ended() == 1
    wait_until(lambda: not shells(system), 60, what="the order to be taken back")


def why_closed(socket: ClientConnection) -> str:
    """The reason with which the server closed it, after all that the shell wrote."""
    try:
        while True:
            socket.recv(60)
    except ConnectionClosed as closed:
        return closed.rcvd.reason if closed.rcvd is not None else "nothing"


def test_it_needs_the_right_to_deploy_and_stands_in_the_audit_log(system: System) -> None:
    """Must be the last test: from the first key on, everybody shows one."""

    def fs(*arguments: str) -> Any:
        return json.loads(system.fs(*arguments, "--json").out)

    fs("key", "create", "admin", "--scope", "admin")
    reader = fs("key", "create", "reader", "--scope", "read", "--scope", "invoke")["key"]
    other = fs("key", "create", "other", "--scope", "deploy", "--function", "other")["key"]
    mine = fs("key", "create", "mine", "--scope", "deploy", "--function", "looks")["key"]
    for key, status in ((reader, 403), (other, 404), ("", 401)):
        with pytest.raises(InvalidStatus) as refused:
            opened(system, key)
        assert refused.value.response.status_code == status
    with opened(system, mine) as socket:
        socket.send('{"type":"start"}')
        system.fs("key", "revoke", "mine")
        assert why_closed(socket) == "key mine was revoked"
    brief = fs("key", "create", "brief", "--scope", "deploy", "--function", "looks", "--expires", "6s")["key"]
    with opened(system, brief) as socket:
        socket.send('{"type":"start"}')
        assert why_closed(socket) == "key brief has expired"
    wanted = {("mine", "function looks", 101), ("reader", "function looks", 403)}

    def shown() -> set[tuple[str, str, int]]:
        lines = [one for one in fs("audit") if one["verb"] == "function.shell"]
        return {(one["by"], one["object"], one["status"]) for one in lines}

    wait_until(lambda: wanted <= shown(), what="the lines of the audit log")
