"""What a sandbox is shown of its node, decided from paths alone; and what is said where none can be started."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.node import exit_codes
from fleetstart.runtime.contract.node.channel import Channel, pair
from fleetstart.runtime.contract.node.messages import (
    Exited,
    Fork,
    Forked,
    ForkFailed,
    ForkServerMessage,
    LauncherReady,
    LauncherUnavailable,
)
from fleetstart.runtime.isolation.root import Mount, mounts
from fleetstart.runtime.launch.gvisor import GVisorLauncher, oci_config
from tests.runtime.workers import receive

NAMES = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=4).map(lambda parts: "/" + "/".join(parts))
SHOWN = st.lists(st.one_of(NAMES.map(lambda path: (path, path)), st.tuples(NAMES, NAMES)), max_size=6)


def source_of(path: str, chosen: tuple[Mount, ...]) -> str | None:
    """Where of the node the path leads, once all is mounted in its order; None into a folder of the sandbox's own."""
    found: str | None = None
    for mount in chosen:
        if path == mount.path or path.startswith(mount.path + "/"):
            found = mount.source + path[len(mount.path) :] if mount.source else None
    return found


def within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


@given(SHOWN, st.lists(NAMES, max_size=4), NAMES)
def test_nothing_hidden_is_reached_but_what_is_shown_by_its_own_name(
    shown: list[tuple[str, str]], hidden: list[str], path: str
) -> None:
    """Of what is shown under its own path: programs that are shown elsewhere are the system's, and hide nothing."""
    shown = [(path, source) for path, source in shown if path == source]
    source = source_of(path, mounts(shown, hidden))
    assert source in (None, path)
    if source is None:
        return
    nearest = max((folder for folder, _ in shown if within(path, folder)), key=len)
    assert nearest not in hidden
    assert not any(within(path, folder) and len(folder) > len(nearest) for folder in hidden)


@given(SHOWN)
def test_all_that_is_shown_is_there_and_parents_come_before_what_lies_in_them(shown: list[tuple[str, str]]) -> None:
    wanted = dict(shown)
    chosen = mounts(list(wanted.items()), [])
    for path, source in wanted.items():
        assert source_of(path, chosen) == source
    depths = [mount.path.count("/") for mount in chosen]
    assert depths == sorted(depths)


def test_what_a_parent_shows_is_not_shown_twice() -> None:
    shown = [("/usr", "/usr"), ("/usr/lib/python3", "/usr/lib/python3"), ("/lib", "/usr/lib")]
    assert [mount.path for mount in mounts(shown, [])] == ["/lib", "/usr"]


def test_a_home_below_something_shown_is_an_empty_folder_there() -> None:
    chosen = mounts([("/opt", "/opt"), ("/opt/home/venv", "/opt/home/venv")], ["/opt/home", "/var/lib/redis"])
    assert chosen == (Mount("/opt", "/opt"), Mount("/opt/home"), Mount("/opt/home/venv", "/opt/home/venv"))


def test_a_bundle_gives_no_rights_and_shows_nothing_writable() -> None:
    config = oci_config(["python"], {"LANG": "C"}, [Mount("/usr", "/usr"), Mount("/h")], root="/empty", hostname="w")
    process = config["process"]
    assert all(rights == [] for rights in process["capabilities"].values())
    assert process["noNewPrivileges"]
    assert config["root"] == {"path": "/empty", "readonly": True}
    binds = [mount for mount in config["mounts"] if mount["type"] == "bind"]
    assert binds
    assert all("ro" in mount["options"] for mount in binds)
    assert process["env"] == ["LANG=C"]


def test_what_can_change_meanwhile_is_looked_at_again() -> None:
    usr = Mount("/usr", "/usr")
    shown = [usr, Mount("/layers/1", "/node/layers/1")]
    config = oci_config(["python"], {}, shown, kept=[usr, Mount("/h")], root="/empty", hostname="w")
    mount = "dev.gvisor.spec.mount.m0"
    assert config["annotations"] == {f"{mount}.source": "/usr", f"{mount}.type": "bind", f"{mount}.share": "container"}


def test_only_who_asks_for_it_is_left_in_the_nodes_network() -> None:
    def kinds(*, network: bool) -> set[str]:
        config = oci_config(["python"], {}, [], root="/empty", hostname="w", network=network)
        return {namespace["type"] for namespace in config["linux"]["namespaces"]}

    assert kinds(network=False) - kinds(network=True) == {"network"}


FORK = Fork(worker=WorkerId("w-1"), cgroup_procs=[], network=False, profile="python")


@contextmanager
def launcher(folder: Path, runsc: str, state: Path) -> Iterator[Channel[ForkServerMessage]]:
    """One whose runsc is this shell script; none if it is empty."""
    if runsc:
        program = folder / "runsc"
        program.write_text(f"#!/bin/sh\n{runsc}\n")
        program.chmod(0o755)
    ours, its = pair()
    argv = [sys.executable, "-m", "fleetstart.runtime.launch.gvisor", "--fd", str(its.fileno()), "--state", str(state)]
    process = subprocess.Popen(argv, pass_fds=(its.fileno(),), env={"PATH": str(folder)}, stderr=subprocess.DEVNULL)
    with its:
        pass
    channel = Channel[ForkServerMessage](ours, ForkServerMessage)
    try:
        yield channel
    finally:
        channel.close()
        assert process.wait(20) == 0


@pytest.mark.parametrize(
    ("runsc", "state", "why"),
    [
        ("", "state", "there is no runsc on PATH"),
        ("echo it is broken >&2; exit 3", "state", "ended with 3: it is broken"),
        ("exit 0", "runsc/state", "runsc/state"),
    ],
    ids=["absent", "broken", "no folder"],
)
def test_a_node_that_can_start_none_says_why_to_whoever_asks(tmp_path: Path, runsc: str, state: str, why: str) -> None:
    with launcher(tmp_path, runsc, tmp_path / state) as channel:
        refused = receive(channel)
        assert isinstance(refused, LauncherUnavailable)
        assert why in refused.reason
        for _ in range(2):
            channel.send(FORK, (0, 1))
            said = receive(channel)
            assert isinstance(said, ForkFailed)
            assert why in said.reason


def test_a_runsc_that_is_gone_or_ends_at_once_is_an_end_like_others(tmp_path: Path) -> None:
    with launcher(tmp_path, 'case "$*" in *probe*) ;; *) exit 7;; esac', tmp_path / "state") as channel:
        assert isinstance(receive(channel), LauncherReady)
        read, write = os.pipe()
        for status in (7, exit_codes.START_FAILED):
            channel.send(FORK, (write, write))
            assert isinstance(receive(channel), Forked)
            assert receive(channel) == Exited(FORK.worker, status)
            (tmp_path / "runsc").unlink(missing_ok=True)
        os.close(write)
        with os.fdopen(read) as log:
            assert "did not start: FileNotFoundError" in log.read()
        assert not list((tmp_path / "state" / "bundles").iterdir())
    assert not (tmp_path / "state").exists()


@pytest.mark.slow
def test_a_start_that_a_full_disk_prevents_leaves_nothing(tmp_path: Path) -> None:
    sandboxes = GVisorLauncher("/bin/true", tmp_path / "state", [], os.environ)
    gc.collect()  # what earlier tests left open would be closed in between
    descriptors = set(os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="large"):
            sandboxes.launch(FORK, 0, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "state" / "bundles").iterdir())
    assert set(os.listdir("/proc/self/fd")) <= descriptors


def test_two_nodes_of_a_machine_probe_sandboxes_of_their_own(tmp_path: Path) -> None:
    """runsc refuses a second sandbox of one name on the machine, whosever it is."""
    program, told = tmp_path / "runsc", tmp_path / "told"
    program.write_text(f'#!/bin/sh\necho "${{@: -1}}" >> {told}\n'.replace("/bin/sh", "/bin/bash"))
    program.chmod(0o755)
    for node in ("a", "b"):
        GVisorLauncher(str(program), tmp_path / node, (), os.environ).probe()
    names = told.read_text().split()
    assert len(set(names)) == 2, names
