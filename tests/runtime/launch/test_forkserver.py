"""The fork server: it ends with its daemon, workers end with it, exits are told, refusals are admitted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.node import exit_codes
from fleetstart.runtime.contract.node.channel import pair
from fleetstart.runtime.contract.node.messages import Fork, ForkFailed
from fleetstart.runtime.isolation import root
from fleetstart.runtime.launch.profiles import SPINS, worker_environment
from tests.runtime.workers import ForkServerProcess, Functions, alive, receive, until
from tests.servers import refusing_namespaces

HELLO = """
    def f(name: str = "world"):
        return f"hello {name}"
"""


@pytest.fixture
def own_server() -> Iterator[ForkServerProcess]:
    """One that the test may harm."""
    server = ForkServerProcess()
    try:
        yield server
    finally:
        server.close()


def test_a_worker_is_pooled_until_it_is_assigned(functions: Functions) -> None:
    worker = functions.server.fork().pooled()
    assert worker.channel.socket.getblocking()
    worker.assign(functions.bundle(HELLO), "handler:f")
    ready = worker.ready()
    assert {phase.name for phase in ready.timeline.phases} == {"start", "import", "load"}
    assert worker.post({"name": "you"}).json() == "hello you"


@pytest.mark.parametrize(
    ("node", "worker"),
    [
        ({}, {"GOMP_SPINCOUNT": SPINS}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ],
)
def test_threads_of_arithmetic_spin_briefly_unless_the_node_says_otherwise(
    node: dict[str, str], worker: dict[str, str]
) -> None:
    made = worker_environment(node | {"SECRET": "x"})
    assert {name: value for name, value in made.items() if name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")} == worker
    assert "SECRET" not in made


def test_the_end_of_the_control_socket_ends_a_pooled_worker(functions: Functions) -> None:
    worker = functions.server.fork().pooled()
    worker.channel.close()
    assert worker.exit_status() == exit_codes.ORPHANED


def test_the_end_of_the_control_socket_ends_a_serving_worker(functions: Functions) -> None:
    worker = functions.ready(HELLO)
    worker.channel.close()
    assert worker.exit_status() == exit_codes.ORPHANED


def test_the_end_of_the_control_socket_ends_a_worker_that_is_busy_starting(functions: Functions) -> None:
    worker = functions.assigned("print('starting')\nwhile True: pass\n")
    until(lambda: "starting" in worker.log(), "the start of the import")
    worker.channel.close()
    assert worker.exit_status() == exit_codes.ORPHANED


def test_a_killed_worker_is_told_with_its_signal(functions: Functions) -> None:
    worker = functions.ready(HELLO)
    os.kill(worker.pid, signal.SIGKILL)
    assert worker.exit_status() == -signal.SIGKILL


def test_workers_die_with_a_killed_fork_server(own_server: ForkServerProcess, tmp_path: Path) -> None:
    functions = Functions(own_server, tmp_path)
    pids = [functions.ready(HELLO).pid, own_server.fork().pooled().pid, own_server.fork().pid]
    os.kill(own_server.process.pid, signal.SIGKILL)
    until(lambda: not any(map(alive, pids)), f"the end of {pids}")


def test_the_fork_server_ends_with_its_channel_and_takes_its_workers_along(own_server: ForkServerProcess) -> None:
    pid = own_server.fork().pooled().pid
    own_server.channel.close()
    assert own_server.process.wait(30) == 0
    until(lambda: not alive(pid), "end of the worker")


def test_the_fork_server_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    daemon = textwrap.dedent("""
        import socket, subprocess, sys, time
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "fleetstart.runtime.launch.forkserver", "--profile", "python", "--root", "."]
        child = subprocess.Popen([*command, "--fd", str(theirs.fileno())], pass_fds=[theirs.fileno(), ours.fileno()])
        ours.recv(65536)
        print(child.pid, flush=True)
        time.sleep(1000)
    """)
    process = subprocess.Popen([sys.executable, "-c", daemon], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stdout is not None
    try:
        pid = int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    # Both ends of its channel are open in itself: only the parent's death can end it.
    until(lambda: not alive(pid), "end of the fork server")


def test_a_worker_holds_its_own_descriptors_alone(functions: Functions) -> None:
    others = [functions.server.fork().pooled() for _ in range(3)]
    worker = functions.server.fork().pooled()
    open_here = {int(name) for name in os.listdir(f"/proc/{worker.pid}/fd")}
    kinds = {fd: os.readlink(f"/proc/{worker.pid}/fd/{fd}") for fd in open_here}
    assert kinds[0] == "/dev/null"
    assert kinds[1] == kinds[2]
    sockets = [fd for fd in open_here if kinds[fd].startswith("socket:")]
    shared = {os.readlink(f"/proc/{other.pid}/fd/{fd}") for other in others for fd in (1, 3)}
    assert 3 in sockets
    assert not shared & set(kinds.values())


def test_the_fork_server_keeps_nothing_of_its_workers(functions: Functions) -> None:
    pid = functions.server.process.pid
    before = len(os.listdir(f"/proc/{pid}/fd"))
    workers = [functions.server.fork().pooled() for _ in range(3)]
    for worker in workers:
        worker.channel.close()
        worker.exit_status()
    assert len(os.listdir(f"/proc/{pid}/fd")) == before
    assert len(os.listdir(f"/proc/{pid}/task")) == 1


def test_the_torch_fork_server_has_one_thread(torch_functions: Functions) -> None:
    assert len(os.listdir(f"/proc/{torch_functions.server.process.pid}/task")) == 1


def test_a_worker_writes_itself_into_its_groups(functions: Functions, tmp_path: Path) -> None:
    procs = tmp_path / "cgroup.procs"
    procs.touch()
    functions.server.fork(cgroup_procs=[str(procs)]).pooled()
    assert procs.read_text() == "0"


def test_a_worker_that_cannot_join_its_group_does_not_run(functions: Functions, tmp_path: Path) -> None:
    worker = functions.server.fork(cgroup_procs=[str(tmp_path / "missing" / "cgroup.procs")])
    assert worker.exit_status() == exit_codes.START_FAILED
    assert "missing/cgroup.procs" in worker.log()


def test_a_fork_without_its_descriptors_is_refused(functions: Functions) -> None:
    ours, theirs = pair()
    functions.server.channel.send(Fork(WorkerId("w-x")), (theirs.fileno(),))
    failed = receive(functions.server.channel)
    assert isinstance(failed, ForkFailed)
    assert "two descriptors" in failed.reason
    ours.close()
    theirs.close()


def test_the_log_carries_both_streams_line_by_line(functions: Functions) -> None:
    worker = functions.ready(
        """
        import os, sys
        def f():
            print("to stdout")
            print("to stderr", file=sys.stderr)
            os.write(1, "as it is: \\u00e4\\n".encode())
        """
    )
    worker.post()
    log = "\x1e1inv-test\x1fto stdout\n\x1e2inv-test\x1fto stderr\nas it is: ä\n"
    assert worker.log() == log


UNSHARE = {"x86_64": 272, "aarch64": 97}


def test_where_namespaces_are_refused_no_worker_starts_unless_that_was_allowed() -> None:
    server = ForkServerProcess(through=refusing_namespaces(), isolation="")
    try:
        assert "unshare(CLONE_NEWNS)" in server.refused
        ours, theirs = pair()
        server.channel.send(Fork(WorkerId("w-x")), (theirs.fileno(), theirs.fileno()))
        failed = receive(server.channel)
        assert isinstance(failed, ForkFailed)
        assert failed.reason == server.refused
        ours.close()
        theirs.close()
    finally:
        server.close()


def test_where_namespaces_are_refused_workers_are_plain_processes_and_say_so(
    plain_server: ForkServerProcess, tmp_path: Path
) -> None:
    assert plain_server.warm.isolation == ""
    assert "unshare" in plain_server.warm.refused
    assert "not permitted" in plain_server.warm.refused
    worker = Functions(plain_server, tmp_path).ready(
        """
        import os
        from pathlib import Path
        import subprocess
        def f():
            child = subprocess.Popen(["sleep", "1000"])
            return {"folder": os.getcwd(), "status": Path("/proc/self/status").read_text(), "child": child.pid}
        """
    )
    assert worker.isolation == ""
    facts = worker.post().json()
    assert facts["folder"].startswith(str(tmp_path))
    status = dict(line.split(":\t", 1) for line in facts["status"].splitlines() if ":\t" in line)
    assert int(status["Pid"]) == worker.pid
    assert status["CapEff"] == status["CapPrm"] == "0000000000000000"
    assert status["NoNewPrivs"] == "1"
    worker.drain()
    assert worker.exit_status() == 0
    until(lambda: not alive(facts["child"]), "end of what the worker started")


def test_a_plain_worker_dies_with_its_fork_server(plain_server: ForkServerProcess, tmp_path: Path) -> None:
    worker = Functions(plain_server, tmp_path).ready(HELLO)
    plain_server.process.kill()
    until(lambda: not alive(worker.pid), "end of the worker")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_an_ordinary_user_gets_namespaces_of_their_own() -> None:
    nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        server = ForkServerProcess(through=nobody)
        try:
            if not server.warm.isolation:
                pytest.skip(f"this machine refuses user namespaces: {server.warm.refused}")
            assert server.warm.isolation == "user,mnt,pid,ipc,uts,net"
            worker = Functions(server, folder).ready(
                """
                import os
                def f():
                    return [os.getpid(), os.getuid(), sorted(os.listdir("/tmp")), os.listdir("/proc/1/ns") != []]
                """
            )
            pid, uid, in_tmp, sees_namespaces = worker.post().json()
            assert (pid, uid, sees_namespaces) == (1, 65534, True)
            runs_from = {
                path.split("/")[2]
                for path in root.interpreter_paths(os.environ.get("LD_LIBRARY_PATH", ""))
                if path.startswith("/tmp/")
            }
            assert set(in_tmp) == {"function"} | runs_from
            assert os.readlink(f"/proc/{worker.pid}/ns/user") != os.readlink("/proc/self/ns/user")
            os.kill(worker.pid, signal.SIGKILL)
            assert worker.exit_status() == -signal.SIGKILL
            other = server.fork().pooled()
            server.process.kill()
            until(lambda: not alive(other.pid), "end of the worker")
        finally:
            server.close()


def test_what_python_runs_from_stays_visible_below_a_masked_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "library"
    library.mkdir()
    (library / "words_of_the_test.py").write_text("WORD = 'kept'\n")
    (tmp_path / "secret").touch()
    monkeypatch.setenv("PYTHONPATH", str(library))
    server = ForkServerProcess(hide=[tmp_path])
    try:
        if not server.warm.isolation:
            pytest.skip(f"this machine refuses namespaces: {server.warm.refused}")
        worker = Functions(server, tmp_path / "bundles").ready(
            f"""
            import os
            def f():
                from words_of_the_test import WORD
                return [WORD, os.listdir({str(tmp_path)!r})]
            """
        )
        assert worker.post().json() == ["kept", ["library"]]
    finally:
        server.close()
