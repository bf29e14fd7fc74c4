"""The compose file: a whole system of containers, called from outside, and gone when it is taken down.

Redis and the S3 server are the programs that its images have, from the packages of this environment: no registry is
reached.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.e2e.images.conftest import FS, LIMIT_S, ImageTests
from tests.servers import plain_environment, valkey_binary, wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.isolations("namespaces", why="its nodes are those of images and compose file"),
]

ROOT = Path(__file__).parents[3]
FILE = ROOT / "images" / "compose.yaml"
URL = "http://127.0.0.1:7433"
BACKENDS = """
FROM fleetstart-base:test
USER 0
COPY weed valkey-server valkey-cli /usr/local/bin/
"""
REACHES = """
import urllib.error
import urllib.request

from fleetstart.runtime import function


@function(network=["controller:7433", "10.0.0.0/8:7433", "172.16.0.0/12:7433", "192.168.0.0/16:7433"])
def reaches(url: str) -> str:
    try:
        return f"{urllib.request.urlopen(url, timeout=10).status}"
    except urllib.error.HTTPError as error:
        return error.read().decode()
"""
CLI = """#!/usr/local/bin/python3
import socket, sys
with socket.create_connection(("127.0.0.1", 6379), 2) as link:
    link.sendall(b"PING\\r\\n")
    sys.exit(link.recv(5) != b"+PONG")
"""


class Composed:
    """A system that compose has brought up on a test's engine."""

    def __init__(self, images: ImageTests, folder: Path) -> None:
        self._images = images
        self._folder = folder
        self.key = ""

    def compose(self, *words: str) -> str:
        address = self._images.engine.address
        env = {
            "PATH": os.environ["PATH"], "HOME": str(self._folder), "DOCKER_HOST": address,
            "COMPOSE_PROJECT_NAME": "fleet", "FS_IMAGE_TAG": "test", "FS_REDIS_IMAGE": "backends",
            "FS_S3_IMAGE": "backends", "FS_NODE_MEMORY": "3GiB",
        }  # fmt: skip
        done = subprocess.run(
            ["docker-compose", "--file", str(FILE), *words],
            env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stderr[-3000:]}\n{self._logs() if words[0] == 'up' else ''}"
        return done.stdout

    def fs(self, *arguments: str) -> str:
        """`fs` at the published port, which is in the engine's own network."""
        done = subprocess.run(
            [*self._images.engine.network, *FS, *arguments],
            env={**plain_environment(), "FS_URL": URL, "FS_KEY": self.key, "HOME": str(self._folder)},
            capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=ROOT,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{self._logs()}"
        return done.stdout

    def _logs(self) -> str:
        engine = self._images.engine
        names = engine.docker("ps", "--all", "--format", "{{.Names}}").split()
        said = {name: subprocess.run(
            ["docker", "--host", engine.address, "logs", "--tail", "25", name],
            capture_output=True, text=True, check=False, timeout=30,
        ) for name in names}  # fmt: skip
        return "\n".join(f"── {name}\n{one.stdout}{one.stderr}" for name, one in said.items())


@pytest.fixture(scope="module")
def composed(images: ImageTests, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composed]:
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is not installed (Debian: apt install docker-compose)")
    folder = tmp_path_factory.mktemp("compose")
    backends = folder / "backends"
    backends.mkdir()
    for source in (Path(sys.executable).parent / "weed", valkey_binary()):
        os.link(os.path.realpath(source), backends / source.name)
    (backends / "valkey-cli").write_text(CLI)
    for path in backends.iterdir():
        path.chmod(0o755)
    (backends / "Dockerfile").write_text(BACKENDS)
    images.engine.docker("build", "--quiet", "--tag", "backends", str(backends))
    system = Composed(images, folder)
    try:
        system.compose("up", "--detach")
        system.key = system.compose("exec", "-T", "controller", "cat", "/var/lib/fleetstart/key").strip()
        yield system
    finally:
        system.compose("down", "--volumes", "--timeout", "5")


def test_two_nodes_join_and_are_healthy(composed: Composed, images: ImageTests) -> None:
    def nodes() -> set[str]:
        return {node["node"] for node in json.loads(composed.fs("nodes", "--json"))}

    wait_until(lambda: nodes() == {"node1", "node2"}, 60, what="both nodes")

    def healthy() -> int:
        return len(images.engine.docker("ps", "--quiet", "--filter", "health=healthy").split())

    wait_until(lambda: healthy() == 4, 60, what="healthy containers: Redis, controller, nodes")


def test_a_function_is_deployed_and_called(composed: Composed) -> None:
    composed.fs("deploy", "examples/hello/handler.py")
    assert json.loads(composed.fs("invoke", "hello", '{"name": "Ada"}')) == {"message": "Hello, Ada!"}


def test_a_language_model_answers_from_weights_in_the_s3_server(composed: Composed) -> None:
    composed.fs("deploy", "examples/chat/handler.py", "--no-probe")
    question = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8, "temperature": 0}
    said = json.loads(composed.fs("invoke", "chat", json.dumps(question), "--path", "/v1/chat/completions"))
    assert said["choices"][0]["message"]["content"]
    assert said["usage"]["completion_tokens"] > 0


def test_functions_are_isolated_by_a_node_without_rights(composed: Composed, images: ImageTests) -> None:
    (node,) = json.loads(composed.fs("nodes", "node1", "--json"))
    assert "net" in json.dumps(node["isolation"]), node
    inside = images.engine.docker("exec", "fleet_node1_1", "cat", "/proc/1/status")
    assert re.search(r"^CapEff:\t0+$", inside, re.MULTILINE)
    assert re.search(r"^NoNewPrivs:\t1$", inside, re.MULTILINE)


def test_a_function_that_lists_the_controller_does_not_reach_it(composed: Composed, tmp_path: Path) -> None:
    (tmp_path / "handler.py").write_text(REACHES)
    composed.fs("deploy", str(tmp_path / "handler.py"))
    asked = json.dumps({"url": "http://controller:7433/healthz"})
    assert "a controller" in json.loads(composed.fs("invoke", "reaches", asked))


def test_down_leaves_nothing(composed: Composed, images: ImageTests) -> None:
    """The last test."""
    composed.compose("down", "--volumes", "--timeout", "5")
    assert images.engine.containers() == []
    assert images.engine.docker("volume", "ls", "--quiet").split() == []
    networks = images.engine.docker("network", "ls", "--format", "{{.Name}}").split()
    assert set(networks) == {"bridge", "host", "none"}


def test_the_file_names_the_images_of_this_release() -> None:
    assert f"FS_IMAGE_TAG:-{version('fleetstart')}" in FILE.read_text()
