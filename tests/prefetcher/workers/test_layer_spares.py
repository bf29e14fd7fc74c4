"""Spares that have imported a version's packages: from the second start on, confined, given up when memory is short."""

from __future__ import annotations

import contextlib
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fleetstart.prefetcher.workers.layer_spare_policy import IDLE_S, SPARES_MAX, SpareState, VersionOf, expired, surplus
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import FunctionName, Version, WorkerId
from fleetstart.runtime.contract.sizes import MIB
from tests.containers.engine import DockerEngine, docker_engine
from tests.prefetcher.layer_store import put_layer
from tests.prefetcher.nodes import Node, Store, call, spec_of
from tests.servers import RedisServer, wait_until

HEAVY = """
import os, sys
AHEAD = "handler" not in sys.modules
COLOUR = os.environ.get("COLOUR", "")
SECRETS = [name for name in os.environ if "SECRET" in name]
HOME = os.environ["HOME"]
try:
    open(__file__, "a").close()
    WRITABLE = True
except OSError:
    WRITABLE = False
STATUS = open("/proc/self/status").read()
"""
LAYER = {
    "heavy/__init__.py": HEAVY.encode(),
    "heavy/late.py": b"",
    "broken.py": b"import sys\nif 'handler' not in sys.modules: raise RuntimeError('not alone')\nX = 1\n",
    "slow.py": b"""
import ctypes, sys, time
if "handler" not in sys.modules:
    ctypes.CDLL(None).prctl(15, b"slow-import")  # its name, that others see
    time.sleep(3)
""",
    "deadly.py": b"import os, sys\nif 'handler' not in sys.modules: os._exit(7)\nX = 1\n",
}
HANDLER = """
import sys
import heavy
BEFORE = [name for name in ("heavy", "heavy.late", "broken") if name in sys.modules]
EXTRA

def hello():
    fields = ("AHEAD", "COLOUR", "SECRETS", "HOME", "WRITABLE")
    status = dict(line.split(":", 1) for line in heavy.STATUS.splitlines())
    import heavy.late as late
    found = {name: getattr(heavy, name) for name in fields}
    return {**found, "capabilities": status["CapEff"].strip(), "seccomp": status["Seccomp"].strip(), "before": BEFORE}
"""
PREPARED = "spare worker prepared"


@pytest.fixture(scope="module")
def engine() -> Iterator[DockerEngine]:
    with docker_engine() as engine:
        yield engine


@pytest.fixture
def node(request: pytest.FixtureRequest, redis_server: RedisServer, store: Store, tmp_path: Path) -> Iterator[Node]:
    """Node whose workers are in namespaces, or as its parameter says."""
    env = {"FS_NODE_MEMORY": "1GiB"}
    if getattr(request, "param", "") == "container":
        engine: DockerEngine = request.getfixturevalue("engine")
        env |= {"FS_CONTAINER_ENGINE": engine.address, "FS_PROFILES": "python,python+container"}
    node = Node(redis_server, str(store.folder), tmp_path / "home", **env)
    try:
        yield node.start()
    finally:
        node.close()


both = pytest.mark.parametrize("node", ["namespaces", "container"], indirect=True)


def isolation_of(node: Node) -> str:
    return "container" if "FS_CONTAINER_ENGINE" in node.env else "namespaces"


def spec_with_layer(store: Store, extra: str = "", **fields: Any) -> FunctionSpec:
    bundle = store.put_bundle({"handler.py": HANDLER.replace("EXTRA", extra)})
    return spec_of(bundle, **{"layer": put_layer(store, LAYER), "env": {"COLOUR": "red"}, **fields})


def answer_of(node: Node, worker: WorkerId) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(call(node.wait_for(worker, "ready"))[1])
    return found


def end(node: Node, worker: WorkerId) -> None:
    node.drain(worker)
    node.wait_for(worker, "gone")
    node.take_back(worker)


def wait_for_spare(node: Node, modules: int = 2) -> None:
    """A spare with all that the version imported, also in its calls."""
    wait_until(lambda: f'"modules": {modules},' in _last_spare(node), 30, what="a prepared spare")


def spares_of(node: Node, function: str) -> int:
    """Number of spares that were prepared for the versions of one function until now."""
    return sum(PREPARED in line and f'"version": "{function}@' in line for line in node.log().splitlines())


def _last_spare(node: Node) -> str:
    return next((line for line in reversed(node.log().splitlines()) if PREPARED in line), "")


@both
def test_from_the_second_start_on_a_versions_packages_are_imported_ahead_and_confined(node: Node, store: Store) -> None:
    spec = spec_with_layer(store, isolation=isolation_of(node))
    first = node.order(spec)
    ordinary = answer_of(node, first)
    assert ordinary["AHEAD"] is False
    end(node, first)
    wait_for_spare(node)

    second = node.order(spec)
    prepared = answer_of(node, second)
    late = "what the handler imported in a call is imported ahead, too"
    assert prepared == {**ordinary, "AHEAD": True, "before": ["heavy", "heavy.late"]}, late
    assert prepared["COLOUR"] == "red"
    assert prepared["SECRETS"] == []
    assert prepared["WRITABLE"] is False
    assert int(prepared["capabilities"], 16) == 0
    assert prepared["seccomp"] == "2"
    status = node.status(second)
    assert status is not None
    assert status.pooled
    wait_until(lambda: (report := node.report()) is not None and report.preloaded_bytes > 0, 30, what="another spare")


def test_modules_that_a_worker_reports_while_its_spare_is_prepared_are_in_the_next_spare(
    node: Node, store: Store
) -> None:
    first = node.order(spec_with_layer(store, "import slow"))
    node.wait_for(first, "ready")
    wait_until(lambda: "slow-import" in _names(node), 30, what="the spare's import")
    answer_of(node, first)  # its call imports another module, which it reports at its end
    end(node, first)
    wait_for_spare(node, modules=3)


def test_a_start_takes_over_the_spare_that_is_being_prepared(node: Node, store: Store) -> None:
    spec = spec_with_layer(store, "import slow")
    first = node.order(spec)
    assert answer_of(node, first)["AHEAD"] is False
    wait_until(lambda: _names(node).count("slow-import") == 1, 30, what="the spare's import")
    second = answer_of(node, node.order(spec))
    assert second["AHEAD"] is True


def _names(node: Node) -> list[str]:
    found = []
    for process in node.descendants():
        with contextlib.suppress(psutil.Error):
            found.append(process.name())
    return found


def test_a_module_that_cannot_be_imported_ahead_is_left_to_the_function(node: Node, store: Store) -> None:
    spec = spec_with_layer(store, "import broken")
    first = node.order(spec)
    answer_of(node, first)
    end(node, first)
    wait_for_spare(node, modules=3)
    assert answer_of(node, node.order(spec))["before"] == ["heavy", "heavy.late"]


def test_a_crash_while_importing_ahead_leaves_the_starts_ordinary(node: Node, store: Store) -> None:
    spec = spec_with_layer(store, "import deadly")
    first = node.order(spec)
    assert answer_of(node, first)["AHEAD"] is False
    wait_until(lambda: "could not be prepared" in node.log(), 30, what="the end of the spare")
    end(node, first)
    second = node.order(spec)
    assert answer_of(node, second)["AHEAD"] is False
    end(node, second)
    assert PREPARED not in node.log()


@both
def test_a_start_that_needs_the_memory_of_a_spare_gets_it(node: Node, store: Store) -> None:
    first = node.order(spec_with_layer(store, isolation=isolation_of(node)))
    answer_of(node, first)
    end(node, first)
    wait_for_spare(node)
    bundle = store.put_bundle({"handler.py": "def hello():\n    return 'hi'\n"})
    node.wait_for(node.order(spec_of(bundle, name=FunctionName("large"), memory_bytes=1024 * MIB)), "ready")
    assert "its memory is needed" in node.log()


@pytest.mark.parametrize("node", ["container"], indirect=True)
def test_a_prepared_container_serves_its_version_alone_and_one_that_was_killed_is_made_anew(
    node: Node, store: Store, engine: DockerEngine
) -> None:
    """Its first start after that is an ordinary one. Another version with the same packages takes no part in it."""
    spec = spec_with_layer(store, isolation="container")
    first = node.order(spec)
    answer_of(node, first)
    end(node, first)
    wait_for_spare(node)
    other = answer_of(
        node, node.order(spec_with_layer(store, "OTHER = 1", name=FunctionName("other"), isolation="container"))
    )
    assert other["AHEAD"] is False

    before = spares_of(node, "hello")
    engine.docker("kill", *engine.docker("ps", "--quiet").split())
    wait_until(lambda: "a prepared spare worker died" in node.log(), 30, what="the end of the spare")
    second = node.order(spec)
    assert answer_of(node, second)["AHEAD"] is False
    end(node, second)
    wait_until(lambda: spares_of(node, "hello") > before, 30, what="another spare")
    assert answer_of(node, node.order(spec))["AHEAD"] is True


@pytest.mark.parametrize("node", ["container"], indirect=True)
def test_a_spare_of_an_image_serves_until_its_name_means_another_one(
    node: Node, store: Store, engine: DockerEngine
) -> None:
    import_coloured(engine, "red")
    fields: dict[str, Any] = {"isolation": "container", "image": "coloured:1", "env": {}}
    spec = spec_with_layer(store, **fields)
    first = node.order(spec)
    assert answer_of(node, first)["AHEAD"] is False
    end(node, first)
    wait_for_spare(node)
    second = node.order(spec)
    answer = answer_of(node, second)
    assert (answer["AHEAD"], answer["COLOUR"]) == (True, "red")
    before = spares_of(node, "hello")
    end(node, second)
    wait_until(lambda: spares_of(node, "hello") > before, 30, what="another spare")

    import_coloured(engine, "blue")
    answer = answer_of(node, node.order(spec))
    assert (answer["AHEAD"], answer["COLOUR"]) == (False, "blue")
    assert "its image's name means another one now" in node.log()


def import_coloured(engine: DockerEngine, colour: str) -> None:
    """An image without files, whose variable has a colour."""
    file = engine.folder / "empty.tar"
    tarfile.open(file, "w").close()
    engine.docker("import", "--change", f"ENV COLOUR={colour}", str(file), "coloured:1")


# ── policy ─────────────────────────────────────────────────────────────────────────────────────────


def version(number: int) -> VersionOf:
    return VersionOf(FunctionName("f"), Version(number))


def test_spares_end_after_a_time_and_above_a_number_the_oldest_first() -> None:
    spares = {version(number): SpareState(MIB, float(number)) for number in range(SPARES_MAX + 2)}
    assert expired(spares, 10.0) == [version(0), version(1)]
    assert expired({version(1): SpareState(MIB, 0.0)}, IDLE_S) == []
    assert expired({version(1): SpareState(MIB, 0.0)}, IDLE_S + 1) == [version(1)]


def test_as_many_spares_end_as_their_memory_is_needed_the_oldest_first() -> None:
    spares = {version(number): SpareState(10 * MIB, -float(number)) for number in range(3)}
    assert surplus(spares, 0) == []
    assert surplus(spares, 1) == [version(2)]
    assert surplus(spares, 11 * MIB) == [version(2), version(1)]
    assert len(surplus(spares, 100 * MIB)) == 3
