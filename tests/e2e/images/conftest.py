"""An engine that has all images: built once for the tests of this folder."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.containers.engine import DockerEngine, docker_engine
from tests.servers import plain_environment

FS = (sys.executable, "-P", "-m", "fleetstart.controller.cli")
LIMIT_S = 400
"""Of a build of all images, which writes a gigabyte, on a machine whose cores are all taken."""


@dataclass(frozen=True)
class ImageTests:
    """An engine with images, and `fs image` for it."""

    engine: DockerEngine
    built: list[dict[str, Any]]

    def fs_image(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run_fs("image", *arguments, "--engine", self.engine.address)

    def python(self, image: str, script: str) -> Any:
        """What a script prints as JSON inside an image."""
        return json.loads(
            self.engine.docker(
                "run", "--rm", "--network=none", "--entrypoint=python", f"fleetstart-{image}:test", "-c", script
            )
        )


def run_fs(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*FS, *arguments], env=plain_environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


@pytest.fixture(scope="package")
def images() -> Iterator[ImageTests]:
    with docker_engine(networks=True) as engine:
        done = run_fs("image", "build", "--base", "installed", "--tag", "test", "--engine", engine.address, "--json")
        assert done.returncode == 0, done.stderr
        yield ImageTests(engine, json.loads(done.stdout))
