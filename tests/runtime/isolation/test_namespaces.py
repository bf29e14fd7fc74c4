"""What a worker cannot do: looked at from the inside, by functions that try."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fleetstart.runtime.isolation import namespaces, root, seccomp
from fleetstart.runtime.isolation.gpu_files import is_gpu_file
from fleetstart.runtime.launch.launcher import has_ended
from tests.runtime.workers import ForkServerProcess, Functions, until

INSPECT = """
    import ctypes, errno, os, socket, resource
    from pathlib import Path

    def status():
        lines = Path("/proc/self/status").read_text().splitlines()
        return dict(line.split(":\\t", 1) for line in lines if ":\\t" in line)

    def f(request):
        return {name: globals()[name]() for name in request}

    def pid(): return os.getpid()
    def processes(): return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
    def folder(): return os.getcwd()
    def environment(): return dict(os.environ)
    def first_environment(): return Path("/proc/self/environ").read_text()
    def descriptors(): return sorted(os.readlink(f"/proc/self/fd/{n}") for n in (0, 1, 2))
    def session(): return os.getsid(0)
    def hostname(): return socket.gethostname()
    def interfaces(): return [name for _, name in socket.if_nameindex()]
    def capabilities(): return {k: v for k, v in status().items() if k.startswith("Cap")}
    def new_privileges(): return status()["NoNewPrivs"]
    def seccomp(): return status()["Seccomp"]
    def limits(): return [resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_CORE)]
    def children(): return os.waitstatus_to_exitcode(os.system("true"))
    def python(): import json.tool, email.mime.text, sqlite3; return True

    # As CUDA names its threads: in each process by its own file.
    def thread_names():
        own = os.path.join("/proc/self/task", str(os.getpid()), "comm")
        Path(own).write_text("mine")
        return [Path(own).read_text(), os.waitstatus_to_exitcode(os.system("echo theirs > /proc/self/task/$$/comm"))]

    # Entries of /proc beside those of processes that open for writing.
    def open_in_proc():
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit() or os.path.islink(os.path.join("/proc", name)):
                continue
            top = os.path.join("/proc", name)
            for path in [top] if os.path.isfile(top) else [os.path.join(f, n) for f, _, ns in os.walk(top) for n in ns]:
                try:
                    os.close(os.open(path, os.O_WRONLY))
                    found.append(path)
                except OSError as error:
                    if error.errno not in (errno.EROFS, errno.EACCES, errno.EIO, errno.EINVAL, errno.EPERM):
                        found.append(f"{path}: {error}")
            try:
                os.chmod(top, os.stat(top).st_mode)
                found.append(f"mode of {top}")
            except OSError as error:
                if error.errno != errno.EROFS:
                    found.append(f"mode of {top}: {error}")
        return found

    def loopback():
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname()).close()
        return True
"""


def test_native_code_stays_visible_to_workers_that_have_not_imported_it_yet() -> None:
    code = """if True:
        import os
        import sys
        from fleetstart.runtime.isolation import root
        paths = root.interpreter_paths(os.environ.get("LD_LIBRARY_PATH", ""))
        assert "fleetstart.native" not in sys.modules
        import fleetstart.native
        from fleetstart.native import _core
        for module in (fleetstart.native, _core):
            assert any(module.__file__.startswith(f"{path}/") for path in paths), (module.__file__, paths)
    """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert result.returncode == 0, result.stderr


def test_the_folder_around_a_checkout_is_no_folder_of_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """An editable installation puts it on sys.path; workers would see every project that lies in it."""
    checkout = Path(namespaces.__file__).resolve().parents[2]
    monkeypatch.setattr(sys, "path", [*sys.path, str(checkout.parent)])
    found = root.interpreter_paths("")
    assert str(checkout.parent) not in found
    assert str(checkout / "runtime") in found
    assert os.path.realpath(sys.prefix) in found


@pytest.mark.usefixtures("needs_namespaces")
class TestConfined:
    def test_it_is_process_1_and_sees_no_other(self, functions: Functions) -> None:
        worker = functions.ready(INSPECT)
        assert worker.isolation == "mnt,pid,ipc,uts,net,uid"
        seen = worker.post(["pid", "processes", "session", "hostname", "folder", "descriptors", "python", "children"])
        facts = seen.json()
        assert facts["pid"] == 1
        assert facts["processes"] == [1]
        assert facts["session"] == 1
        assert facts["hostname"] == worker.name
        assert facts["folder"] == namespaces.FUNCTION_DIR
        assert facts["descriptors"][0] == "/dev/null"
        assert facts["children"] == 0
        assert os.readlink(f"/proc/{worker.pid}/ns/pid") != os.readlink("/proc/self/ns/pid")

    def test_of_proc_it_may_write_what_is_of_its_processes_alone(self, functions: Functions) -> None:
        facts = functions.ready(INSPECT).post(["thread_names", "open_in_proc"]).json()
        assert facts == {"thread_names": ["mine\n", 0], "open_in_proc": []}

    def test_it_has_a_loopback_and_no_other_network(self, functions: Functions) -> None:
        facts = functions.ready(INSPECT).post(["interfaces", "loopback"]).json()
        assert facts == {"interfaces": ["lo"], "loopback": True}

    def test_a_function_that_asks_for_the_network_has_it(self, functions: Functions) -> None:
        worker = functions.ready(INSPECT, network=True)
        assert worker.isolation == "mnt,pid,ipc,uts,uid"
        assert os.readlink(f"/proc/{worker.pid}/ns/net") == os.readlink("/proc/self/ns/net")

    def test_it_has_no_rights(self, functions: Functions) -> None:
        facts = functions.ready(INSPECT).post(["capabilities", "new_privileges", "seccomp", "limits"]).json()
        assert set(facts["capabilities"].values()) == {"0000000000000000"}
        assert len(facts["capabilities"]) == 5
        assert facts["new_privileges"] == "1"
        assert facts["seccomp"] == ("2" if seccomp.supported() else "0")
        assert facts["limits"][0][1] <= namespaces.OPEN_FILES_MAX
        assert facts["limits"][1] == [0, 0]

    def test_its_environment_holds_nothing_of_the_daemons(self, functions: Functions) -> None:
        facts = functions.ready(INSPECT, env={"GREETING": "hi"}).post(["environment", "first_environment"]).json()
        assert facts["environment"]["GREETING"] == "hi"
        assert "A_SECRET_OF_THE_DAEMON" not in facts["environment"]
        assert "A_SECRET_OF_THE_DAEMON" not in facts["first_environment"]

    def test_it_may_write_in_tmp_and_shm_alone(self, functions: Functions) -> None:
        worker = functions.ready(
            """
            import errno, os
            def f(paths: list[str]):
                said = {}
                for path in paths:
                    try:
                        open(path, "w").close()
                        said[path] = "written"
                    except OSError as error:
                        said[path] = errno.errorcode[error.errno]
                return said
            """
        )
        refused = ["/x", "/etc/x", "/tmp/function/x", "/dev/x", "/run/x", "/proc/sys/kernel/core_pattern", "/root/x"]
        said = worker.post({"paths": ["/tmp/of-a-worker", "/dev/shm/x", "/dev/null", *refused]}).json()
        assert [said.pop(path) for path in ("/tmp/of-a-worker", "/dev/shm/x", "/dev/null")] == ["written"] * 3
        assert set(said.values()) <= {"EROFS", "EACCES"}, said
        assert not Path("/tmp/of-a-worker").exists()

    def test_hidden_folders_and_devices_are_empty_and_the_bundle_is_there(
        self, functions: Functions, hidden: Path
    ) -> None:
        worker = functions.ready(
            """
            import os
            def f(paths: list[str]):
                return {path: sorted(os.listdir(path)) if os.path.isdir(path) else None for path in paths}
            """
        )
        home = os.path.expanduser("~")
        paths = [str(hidden), "/usr/share", "/tmp/function", "/tmp", "/run", "/dev", "/home", home]
        seen = worker.post({"paths": paths}).json()
        assert not seen[str(hidden)]
        assert set(seen["/usr/share"]) <= {"zoneinfo"}  # /etc/localtime leads there
        assert seen["/tmp/function"] == ["handler.py"]
        needed = root.interpreter_paths(os.environ.get("LD_LIBRARY_PATH", ""))
        for folder in ("/home", home):
            for name in seen[folder] or ():
                assert any(f"{path}/".startswith(f"{folder}/{name}/") for path in needed), f"{folder}/{name} is seen"
        assert "function" in seen["/tmp"]
        assert "redis.sock" not in str(seen)
        harmless = {*root.DEVICES, "fd", "stdin", "stdout", "stderr", "shm", "pts", "ptmx", "tty"}
        assert {n for n in seen["/dev"] if not is_gpu_file(n)} <= harmless

    def test_the_space_for_writing_is_limited(self, functions: Functions) -> None:
        worker = functions.ready(
            """
            def f():
                try:
                    with open("/tmp/x", "wb", buffering=0) as file:
                        for _ in range(64):
                            file.write(bytes(1 << 20))
                except OSError as error:
                    return error.strerror
            """,
            memory_bytes=16 << 20,
        )
        assert worker.post().json() == "No space left on device"

    def test_what_it_started_ends_with_it(self, functions: Functions) -> None:
        worker = functions.ready(
            """
            import subprocess
            def f():
                subprocess.Popen(["sleep", "1000"], start_new_session=True)
            """
        )
        assert worker.post().status_code == 200
        pids = {
            int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _namespace(p) == _namespace(worker.pid)
        }
        assert len(pids) == 2
        worker.drain()
        assert worker.exit_status() == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def _namespace(process: int | Path) -> str:
    path = process if isinstance(process, Path) else Path(f"/proc/{process}")
    try:
        return os.readlink(path / "ns/pid")
    except OSError:
        return ""


@pytest.mark.skipif(not seccomp.supported(), reason="no call numbers for this architecture")
@pytest.mark.usefixtures("needs_namespaces")
def test_a_function_cannot_have_its_worker_outlive_the_node(tmp_path: Path) -> None:
    """The function takes back the signal of its parent's death, and covers the socket whose end would tell it."""
    server = ForkServerProcess()
    try:
        worker = Functions(server, tmp_path).ready(
            """
            import ctypes, os, socket
            libc = ctypes.CDLL(None)
            kept = []
            async def f():  # on the thread that has the signal
                kept.append(socket.socketpair())
                asked = [libc.prctl(1, number, 0, 0, 0) for number in (0, 2)]
                os.dup2(kept[0][0].fileno(), 3)
                signal = ctypes.c_int()
                libc.prctl(2, ctypes.byref(signal), 0, 0, 0)
                return asked, signal.value
            """
        )
        pidfd = os.pidfd_open(worker.pid)
        try:
            assert worker.post().json() == [[0, 0], 9]
            server.process.kill()
            server.process.wait()
            until(lambda: has_ended(pidfd), "the end of the worker")
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
    finally:
        server.close()
