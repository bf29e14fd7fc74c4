"""Fork servers for the session, workers for each test; no worker outlives its test."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetstart.runtime.isolation import seccomp
from tests.runtime.workers import ForkServerProcess, Functions, served
from tests.servers import refusing_namespaces


@pytest.fixture(scope="session")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that workers must not see into, with a bundle below it, as a node's state folder has them."""
    folder = tmp_path_factory.mktemp("state")
    (folder / "redis.sock").write_text("a secret")
    return folder


@pytest.fixture(scope="session")
def python_server(hidden: Path) -> Iterator[ForkServerProcess]:
    server = ForkServerProcess(hide=[hidden, Path("/usr/share")])
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def torch_server() -> Iterator[ForkServerProcess]:
    pytest.importorskip("torch")
    server = ForkServerProcess("torch")
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def functions(python_server: ForkServerProcess, hidden: Path, tmp_path: Path) -> Iterator[Functions]:
    """Bundles lie below the hidden folder, as a node's do."""
    yield from served(python_server, hidden / tmp_path.name)


@pytest.fixture
def torch_functions(torch_server: ForkServerProcess, tmp_path: Path) -> Iterator[Functions]:
    yield from served(torch_server, tmp_path)


@pytest.fixture
def plain_server() -> Iterator[ForkServerProcess]:
    """Started under a filter that refuses namespaces, as container engines put over what they run."""
    if not seccomp.supported():
        pytest.skip(f"no call numbers for {platform.machine()}")
    server = ForkServerProcess(through=refusing_namespaces(), isolation="best-effort")
    try:
        yield server
    finally:
        server.close()
