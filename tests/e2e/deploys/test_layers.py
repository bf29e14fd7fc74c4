"""Functions with packages of their own, from the deploy to the answer."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fleetstart.controller.cli.home import HomeLayout
from fleetstart.controller.cli.packages.uv import find_uv
from tests.containers.engine import docker_engine
from tests.e2e.load import loaded
from tests.e2e.systems import FS, System, running
from tests.servers import wait_until
from tests.wheels import OFFLINE, make_wheel
from tests.wheels import index as index_of

ANSWERS = """
import sys
import shape
from fleetstart.runtime import Scale, function

@function(memory="64MiB", requirements=["shape==VERSION"], scale=Scale(keep_alive_s=600))
def answers():
    try:
        open(shape.__file__, "a").close()
        writable = True
    except OSError:
        writable = False
    return {"version": shape.VERSION, "colour": shape.colour(), "cached": shape.__cached__, "writable": writable}
"""


@pytest.fixture(scope="module")
def wheels() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fs-wheels-") as folder:
        for version in ("1.0", "2.0"):
            text = f"import colour\nVERSION = '{version}'\ndef colour(): return __import__('colour').NAME\n"
            make_wheel(Path(folder), "shape", version, {"shape/__init__.py": text}, requires=["colour"])
        make_wheel(Path(folder), "colour", "3.0", {"colour.py": "NAME = 'green'\n"})
        yield Path(folder)


@pytest.fixture(scope="module")
def layered(wheels: Path) -> Iterator[System]:
    with running(env={"FS_PROFILES": "python", **index_of(wheels)}) as system:
        yield system


def source(version: str) -> str:
    return ANSWERS.replace("VERSION", version, 1)


def test_two_functions_with_two_versions_of_one_package_answer_with_their_own(layered: System) -> None:
    for version in ("1.0", "2.0"):
        layered.deploy(source(version), name=f"shape-{version[0]}")
    answers = {version: layered.ok(f"shape-{version[0]}") for version in ("1.0", "2.0")}
    assert {version: answer["version"] for version, answer in answers.items()} == {"1.0": "1.0", "2.0": "2.0"}
    assert {answer["colour"] for answer in answers.values()} == {"green"}
    assert not any(answer["writable"] for answer in answers.values())
    assert all(answer["cached"].endswith(".pyc") for answer in answers.values())


def test_a_second_function_with_the_same_requirements_sends_and_builds_nothing(layered: System) -> None:
    layered.deploy(source("1.0"), name="first")
    ran = layered.fs("deploy", str(layered.source(source("1.0"), folder="second")), "--name", "second")
    assert "2 packages" in ran.err
    assert "in the store already" in ran.err
    assert "building" not in ran.err
    assert layered.info("first").spec.layer == layered.info("second").spec.layer
    assert layered.ok("second")["version"] == "1.0"


def test_a_failed_build_shows_the_sentence_of_uv_and_changes_nothing(layered: System) -> None:
    layered.deploy(source("1.0"), name="steady")
    error = layered.refused(layered.source(source("9.9"), folder="steady"), "--name", "steady")
    assert error.code == "build_failed"
    assert "shape" in error.message
    assert "9.9" in error.message
    assert layered.info("steady").version == 1
    assert layered.ok("steady")["version"] == "1.0"


def test_a_file_beside_the_handler_is_taken(layered: System) -> None:
    text = source("1.0").replace('requirements=["shape==1.0"], ', "")
    handler = layered.source(text, folder="listed")
    (handler.parent / "requirements.txt").write_text("# what it needs\nshape>1.5\n")
    ran = layered.fs("deploy", str(handler), "--name", "listed")
    assert "Resolved 2 packages" in ran.err  # uv's log
    assert layered.ok("listed")["version"] == "2.0"


def test_a_deploy_warns_of_imports_that_workers_will_not_find(layered: System) -> None:
    text = source("1.0").replace("import shape\n", "import shape\n\ndef later():\n    import no_such_module\n")
    ran = layered.fs("deploy", str(layered.source(text, folder="warned")), "--name", "warned")
    assert "no_such_module is neither in the bundle" in ran.err
    assert "handler.py:6" in ran.err
    assert "shape is neither" not in ran.err


def test_a_lock_of_uv_is_installed_as_it_is(layered: System, wheels: Path) -> None:
    text = source("1.0").replace('requirements=["shape==1.0"], ', "")
    handler = layered.source(text, folder="locked")
    (handler.parent / "pyproject.toml").write_text(
        '[project]\nname = "locked"\nversion = "1"\nrequires-python = ">=3.11"\ndependencies = ["shape<2"]\n'
    )
    subprocess.run([find_uv(), "lock", "-q"], cwd=handler.parent, env=layered.env, check=True)
    ran = layered.fs("deploy", str(handler), "--name", "locked")
    assert "uv.lock: building" in ran.err
    assert layered.ok("locked")["version"] == "1.0"
    export = ["export", "-q", "--frozen", "--format", "pylock.toml", "--no-emit-project", "-o", "pylock.toml"]
    subprocess.run([find_uv(), *export], cwd=handler.parent, env=layered.env, check=True)
    ran = layered.fs("deploy", str(handler), "--name", "locked")
    assert "pylock.toml: building" in ran.err
    assert layered.ok("locked")["version"] == "1.0"


def test_options_of_a_requirements_file_say_where_packages_are(layered: System, tmp_path: Path) -> None:
    make_wheel(tmp_path / "elsewhere", "far", "1.0", {"far.py": "AWAY = 7\n"})
    text = "import far\nfrom fleetstart.runtime import function\n\n@function\ndef away():\n    return far.AWAY\n"
    handler = layered.source(text, folder="away")
    (handler.parent / "requirements.txt").write_text(f"-f {tmp_path / 'elsewhere'}\nfar\n")
    layered.fs("deploy", str(handler))
    assert layered.ok("away") == 7


def test_upgrade_looks_for_newer_versions_of_what_is_left_open(layered: System, tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", "grows", "1.0", {"grows.py": "V = 1\n"})
    text = "import grows\nfrom fleetstart.runtime import function\n\n@function\ndef size():\n    return grows.V\n"
    handler = layered.source(text, folder="size")
    (handler.parent / "requirements.txt").write_text(f"-f {tmp_path / 'wheels'}\ngrows\n")
    layered.fs("deploy", str(handler), "--no-probe")
    make_wheel(tmp_path / "wheels", "grows", "2.0", {"grows.py": "V = 2\n"})
    layered.fs("deploy", str(handler), "--no-probe")
    assert layered.info("size").version == 1
    layered.fs("deploy", str(handler), "--upgrade")
    assert (layered.info("size").version, layered.ok("size")) == (2, 2)


def test_a_project_may_list_the_platform_itself(layered: System) -> None:
    handler = layered.source(source("1.0").replace('requirements=["shape==1.0"], ', ""), folder="project")
    project = '[project]\nname = "project"\nversion = "1"\ndependencies = ["shape<2", "fleetstart"]\n'
    (handler.parent / "pyproject.toml").write_text(project)
    layered.fs("deploy", str(handler), "--name", "project")
    assert layered.ok("project")["version"] == "1.0"


@pytest.mark.skipif(shutil.which("runsc") is None, reason="runsc (gVisor) is not installed")
def test_a_build_that_is_killed_under_load_leaves_nothing_and_the_next_one_goes_on(layered: System) -> None:
    """Its index takes connections and never answers, so the build stays where it is until `fs` is killed."""
    layered.deploy(source("1.0"), name="loaded")
    builds = HomeLayout(layered.home).cache.parent / "layers"
    handler = layered.source(source("1.0").replace("shape==1.0", "slow==1.0"), folder="slow")
    with socket.create_server(("127.0.0.1", 0)) as index, loaded(layered, "loaded", clients=2) as load:
        env = {name: value for name, value in layered.env.items() if name not in {*OFFLINE, "UV_FIND_LINKS"}}
        env["UV_INDEX_URL"] = f"http://127.0.0.1:{index.getsockname()[1]}/simple"
        deploy = subprocess.Popen(
            [*FS, "deploy", str(handler)], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        index.settimeout(30)
        connection, _ = index.accept()
        with connection:
            (uv,) = psutil.Process(deploy.pid).children()
            load.wait_for(10)
            deploy.kill()
            deploy.wait()
            wait_until(lambda: not uv.is_running(), 10, what="the end of uv")
        assert list(builds.glob(".build-*")), "it could not remove its folder"
        load.wait_for(10)
        layered.deploy(
            source("2.0").replace('"shape==2.0"', '"shape==2.0", "colour<4"'), name="slow"
        )  # was not built yet
        assert layered.ok("slow")["version"] == "2.0"
        assert not list(builds.glob(".*"))
    assert {answer.status for answer in load.answers} == {200}


@pytest.mark.isolations("namespaces", why="the function names its own isolation")
@pytest.mark.parametrize("isolation", ["gvisor", "container"])
def test_a_sandbox_sees_its_layer_read_only_and_a_container_that_waited_does(wheels: Path, isolation: str) -> None:
    with contextlib.ExitStack() as opened:
        settings = {"FS_PROFILES": f"python,python+{isolation}", **index_of(wheels)}
        if isolation == "container":
            settings["FS_CONTAINER_ENGINE"] = opened.enter_context(docker_engine()).address
        system = opened.enter_context(running(env=settings))
        wait_until(lambda: system.status().nodes[0].isolations, 60, what="a launcher of sandboxes")
        text = source("1.0").replace('memory="64MiB"', f'memory="128MiB", isolation="{isolation}"')
        system.deploy(text, name="other")
        assert system.ok("other")["version"] == "1.0"
        # The first of a kind starts its pool; into a container that waited there packages are mounted.
        log, line = system.home / "logs" / "node.log", f'"python+{isolation}"'
        wait_until(
            lambda: any("worker preforked" in one and line in one for one in log.read_text().splitlines()),
            60,
            what="a sandbox that waits",
        )
        system.deploy(text.replace("shape==1.0", "shape==2.0"), name="sealed")
        answer = system.ok("sealed")
        assert (answer["version"], answer["writable"]) == ("2.0", False)
        assert answer["cached"].startswith("/layer/")
        assert system.info("sealed").workers[0].pooled is (isolation == "container")
