"""Systems for end-to-end tests: `system` is one for the session, `own_system` one for a test that breaks things."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.engine import docker_engine
from tests.e2e import systems
from tests.e2e.systems import System, running
from tests.runner.scopes import ON_SHARED_SYSTEM

HERE = Path(__file__).parent
WELL = """
from fleetstart.runtime import Scale, function

@function(memory="64MiB", concurrency=4, scale=Scale(max=2, keep_alive_s=600))
def well(name: str = "you"):
    return {"well": name}
"""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)
    left_out = [item for item in items if not _runs_with(item, config.getoption("--isolation"))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _runs_with(item: pytest.Item, isolation: str) -> bool:
    mark = item.get_closest_marker("isolations")
    return mark is None or isolation in mark.args


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Holds that a file whose tests use the system of all is listed: one worker is to run all of these files."""
    fixtures = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    file = item.nodeid.split("::", 1)[0]
    if file not in ON_SHARED_SYSTEM and any(found.baseid == "tests/e2e" for found in fixtures.get("system", ())[-1:]):
        pytest.fail(f"{file} uses `system`: add it to ON_SHARED_SYSTEM in tests/runner/scopes.py", pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def driver(request: pytest.FixtureRequest) -> Iterator[None]:
    """The isolation that was asked for: it is that of every deploy, and containers get an engine for the whole run."""
    isolation = request.config.getoption("--isolation")
    if isolation == "namespaces":
        yield
        return
    if isolation == "gvisor" and shutil.which("runsc") is None:
        pytest.skip("runsc (gVisor) is not installed")
    with contextlib.ExitStack() as opened:
        engine = opened.enter_context(docker_engine()).address if isolation == "container" else ""
        systems.driver = systems.Driver(isolation, engine)
        yield
        systems.driver = None


@pytest.fixture(scope="session")
def system() -> Iterator[System]:
    """System that is up, with a function `well` deployed that always works. Tests leave it as they found it."""
    # 127.0.0.2 is where a test has a server to be reached.
    devices = {} if systems.isolation() == "gvisor" else {"FS_DEVICES": "cpu:2x1GiB"}  # functions in it have none
    with running(env={"FS_EGRESS_ALLOW": "127.0.0.2", **devices}) as system:
        system.deploy(WELL, name="well")
        yield system


@pytest.fixture
def own_system() -> Iterator[System]:
    """System that is up, without torch: quick to start."""
    with running(env={"FS_PROFILES": "python"}) as system:
        yield system


@pytest.fixture
def unharmed(system: System) -> Iterator[None]:
    """Around a test that misbehaves: every part lives through it, and another function answers after it."""
    parts = {kind: system.of_kind(kind) for kind in ("supervisor", "controller", "node", "redis", "forkserver")}
    yield
    assert system.ok("well", {"name": "Ada"}, timeout_s=10) == {"well": "Ada"}
    assert {kind: system.of_kind(kind) for kind in parts} == parts
    assert not any(system.deaths().values())
