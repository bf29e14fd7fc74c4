"""The root of a worker: planned from paths and links alone, and seen from inside by functions that try to leave it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.isolation import root
from fleetstart.runtime.isolation.root import Mount, Root
from tests.runtime.workers import USER, ForkServerProcess, Functions

NAMES = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(lambda parts: "/" + "/".join(parts))
TARGETS = st.one_of(NAMES, st.sampled_from(["a", "b/c", "../c", "."]))


def is_ring(path: str, links: dict[str, str]) -> bool:
    """True if more links were met than there are: one of them twice."""
    met: list[str] = []

    def readlink(link: str) -> str | None:
        if link in links:
            met.append(link)
        return links.get(link)

    root.follow(path, readlink)
    return len(met) > len(set(met))


@given(NAMES, st.dictionaries(NAMES, TARGETS, max_size=5))
def test_a_path_that_leads_over_links_ends_where_the_kernel_would_end(path: str, links: dict[str, str]) -> None:
    real, followed = root.follow(path, links.get)
    assert set(followed) <= set(links)
    again, none = root.follow(real, links.get)
    assert (again, none) == (real, {}) or is_ring(path, links)


def test_links_are_followed_in_a_real_folder_as_the_kernel_follows_them(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "to-a").symlink_to("a")
    (tmp_path / "a" / "up").symlink_to("../to-a/b")
    (tmp_path / "whole").symlink_to(tmp_path / "to-a" / "up")
    real, followed = root.follow(str(tmp_path / "whole"), root._readlink)
    assert real == os.path.realpath(tmp_path / "whole") == str(tmp_path / "a" / "b")
    assert {os.path.basename(link) for link in followed} == {"whole", "to-a", "up"}


@given(st.lists(NAMES, max_size=5), st.lists(NAMES, max_size=3), st.dictionaries(NAMES, NAMES, max_size=3))
def test_every_path_that_is_not_hidden_is_there_under_its_own_name(
    paths: list[str], hidden: list[str], links: dict[str, str]
) -> None:
    planned = root.plan(paths, hidden, links.get)
    places = {mount.path: mount for mount in planned.mounts}
    made = dict(planned.links)
    for path in paths:
        real, followed = root.follow(path, links.get)
        if real in {root.follow(one, links.get)[0] for one in hidden} or is_ring(path, links):
            continue
        nearest = max((place for place in places if (real + "/").startswith(place + "/")), key=len)
        assert places[nearest].source == nearest
        assert all(link in made or any((link + "/").startswith(place + "/") for place in places) for link in followed)


def test_a_library_brings_its_folder_only_if_that_is_one_of_libraries() -> None:
    assert root.library_folder("/opt/x/lib64/libx.so.1") == "/opt/x/lib64"
    assert root.library_folder("/home/me/x.so") == "/home/me/x.so"


def test_what_is_shown_in_a_folder_of_the_workers_own_is_mounted_there_again() -> None:
    mounts = (Mount("/usr", "/usr"), Mount("/tmp/venv", "/tmp/venv"), Mount("/tmp/venv/state"), Mount("/tmpx", "/tmpx"))
    whole = Root(mounts, (("/tmp/link", "venv"), ("/tmp/venv/link", "x"), ("/link", "/usr")))
    assert root.inside(whole, "/tmp") == Root((Mount("/tmp/venv", "/tmp/venv"),), (("/tmp/link", "venv"),))


LOOK = """
    import glob, os, pwd, grp, socket
    from pathlib import Path

    def f(request):
        return {name: globals()[name]() for name in request}

    def tried(path):
        try:
            return Path(path).read_text(errors="replace")[:2000]
        except OSError as error:
            return type(error).__name__

    def top(): return sorted(os.listdir("/"))
    def etc(): return sorted(os.listdir("/etc"))
    def var(): return [sorted(os.listdir("/var")), os.path.realpath("/var/tmp")]
    def sys(): return sorted(path for path in glob.glob("/sys/*/*/*"))
    def shadow(): return [tried(path) for path in ("/etc/shadow", "/etc/ssh/sshd_config", "/etc/hostname")]
    def kernel(): return {name: tried(f"/proc/{name}") for name in ("kallsyms", "keys", "interrupts", "modules")}
    def needed(): return bool(tried("/proc/cpuinfo") and tried("/proc/meminfo") and os.cpu_count())
    def node(): return os.listdir("/.node")
    def mounted(): return [line.split()[4] for line in open("/proc/self/mountinfo")]
    def user(): return [os.getresuid(), os.getresgid(), os.getgroups()]
    def names(): return [pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(os.getgid()).gr_name, os.path.expanduser("~")]
    def users(): return [one.pw_name for one in pwd.getpwall()]
    def hosts(): return socket.gethostbyname(socket.gethostname())
    def own(): return [open(f"/proc/self/{name}").read() != "" for name in ("environ", "maps", "status")]

    def log():
        with open("/dev/stderr", "w") as file:
            file.write("by its name\\n")
        return sorted(os.listdir("/proc/self/fd")) != []

    def remount():
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        return [libc.mount(b"none", b"/", None, 32, None), libc.umount2(b"/tmp", 2), libc.chroot(b"/tmp")]
"""


@pytest.fixture
def needs_namespaces(python_server: ForkServerProcess) -> None:
    if not python_server.warm.isolation:
        pytest.skip(f"this machine refuses namespaces: {python_server.warm.refused}")


@pytest.mark.usefixtures("needs_namespaces")
class TestInside:
    def test_nothing_of_the_nodes_own_tree_is_there(self, functions: Functions) -> None:
        worker = functions.ready(LOOK)
        seen = worker.post(["top", "etc", "var", "shadow", "node", "sys", "remount", "mounted"]).json()
        top = {*(path.split("/")[1] for path in root.SYSTEM + root.OWN_FOLDERS), "sys", "dev", "tmp", ".node"}
        python = {path.split("/")[1] for path in root.interpreter_paths("")}
        assert set(seen["top"]) <= top | python
        assert set(seen["etc"]) <= {
            *(path.split("/")[2] for path in root.SYSTEM if path.startswith("/etc/")),
            *("passwd", "group", "hosts", "resolv.conf", "nsswitch.conf"),
        }
        assert seen["var"] == [["run", "tmp"], "/tmp"]
        assert seen["shadow"] == ["FileNotFoundError"] * 3
        assert seen["node"] == []
        assert {path.split("/")[2] for path in seen["sys"]} <= {"devices", "bus", "class", "module"}
        assert set(seen["remount"]) == {-1}
        covered = [path for path in seen["mounted"] if path.startswith("/.node")]
        assert len(covered) <= 4, "of the node's mounts only the folder with code and packages is left, and covered"

    def test_proc_shows_what_libraries_need_and_not_the_machine(self, functions: Functions) -> None:
        seen = functions.ready(LOOK).post(["kernel", "needed", "own"]).json()
        assert set(seen["kernel"].values()) <= {"", "FileNotFoundError"}
        assert seen["needed"] is True
        assert seen["own"] == [True] * 3

    def test_it_has_a_user_of_its_own_with_a_name(self, functions: Functions) -> None:
        worker = functions.ready(LOOK)
        if "uid" not in worker.isolation.split(","):
            pytest.skip("this machine has no user ids to give")
        seen = worker.post(["user", "names", "users", "hosts", "log"]).json()
        assert seen["user"] == [[USER] * 3, [USER] * 3, []]
        assert seen["names"] == ["function", "function", "/tmp"]
        assert sorted(seen["users"]) == ["function", "nobody", "root"]
        assert seen["hosts"] == "127.0.0.1"
        assert seen["log"] is True
        assert "by its name" in worker.log()
        assert os.stat(f"/proc/{worker.pid}").st_uid == USER

    def test_functions_cannot_use_up_each_others_share_of_what_the_kernel_counts_by_user(
        self, functions: Functions
    ) -> None:
        source = """
            import ctypes
            libc = ctypes.CDLL(None, use_errno=True)
            def f():
                made = 0
                while libc.inotify_init() >= 0 and made < 2000:
                    made += 1
                return made
        """
        greedy, other = functions.assigned(source, user=USER), functions.assigned(source, user=USER + 1)
        if "uid" not in greedy.isolation.split(","):
            pytest.skip("this machine has no user ids to give")
        greedy.ready()
        other.ready()
        most = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())
        assert greedy.post().json() == min(most, 2000)
        assert other.post().json() == min(most, 2000)
