"""Images as they are built by `fs image build` and run by a real engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.images.conftest import ImageTests, run_fs

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.isolations("namespaces", why="its nodes are those of images and compose file"),
]

NAMES = ("base", "controller", "worker", "node")
SIZE_MIB_MOST = {"base": 160, "controller": 320, "worker": 1100, "node": 1200}
"""With the interpreter's debugging symbols, which a base of python:3.11-slim has not; a third above what they have."""

UNCOMPILED = """
import importlib.util, json, os, sys
found = []
for folder, _, files in os.walk("/opt/fleetstart/lib"):
    for path in (os.path.join(folder, name) for name in files if name.endswith(".py")):
        stat = os.stat(path)
        header = importlib.util.MAGIC_NUMBER + b"\\0\\0\\0\\0" + int(stat.st_mtime).to_bytes(4, "little")
        try:
            with open(importlib.util.cache_from_source(path), "rb") as file:
                good = file.read(16) == header + stat.st_size.to_bytes(4, "little")
        except FileNotFoundError:
            good = False
        try:
            if not good and compile(open(path, "rb").read(), path, "exec", dont_inherit=True):
                found.append(path)
        except SyntaxError:
            pass  # written for another version of Python, as torch has some
user = [os.getuid(), os.getgid()]
print(json.dumps({"uncompiled": found, "user": user, "writable": os.access("/opt/fleetstart", os.W_OK)}))
"""
INSTALLED = """
import json
from importlib.metadata import distributions
bill = json.load(open("/opt/fleetstart/sbom.cdx.json"))
def plain(name):
    return name.lower().replace("_", "-").replace(".", "-")
print(json.dumps({
    "installed": sorted(f"{plain(one.name)}=={one.version}" for one in distributions()),
    "billed": sorted(f"{one['name']}=={one['version']}" for one in bill["components"]),
}))
"""


def test_all_are_built_in_order_and_listed(images: ImageTests) -> None:
    assert [image["name"] for image in images.built] == list(NAMES)
    assert all(image["size_bytes"] >> 20 <= SIZE_MIB_MOST[image["name"]] for image in images.built), images.built
    listed = json.loads(images.fs_image("ls", "--json").stdout)
    assert {row["id"] for row in listed} == {image["id"] for image in images.built}
    assert {row["tag"] for row in listed} == {f"fleetstart-{name}:test" for name in NAMES}
    shown = images.fs_image("ls").stdout
    assert "fleetstart-node:test" in shown
    assert "+cpu" in shown or "-cuda" in shown


@pytest.mark.parametrize("name", NAMES)
def test_an_image_runs_without_rights_and_says_what_it_is(images: ImageTests, name: str) -> None:
    config = json.loads(images.engine.docker("image", "inspect", f"fleetstart-{name}:test"))[0]["Config"]
    assert config["User"] == "10001:10001"
    labels = config["Labels"]
    assert labels["org.opencontainers.image.title"] == f"fleetstart-{name}"
    assert labels["org.opencontainers.image.version"] == "test"
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.base.name"].startswith("fleetstart-")
    if name in ("controller", "node"):
        assert config["Healthcheck"]["Test"][-1] == name


@pytest.mark.parametrize("name", ["controller", "node"])
def test_all_modules_are_compiled_and_nothing_of_ours_can_be_changed(images: ImageTests, name: str) -> None:
    """The node's image has the worker's layers."""
    seen = images.python(name, UNCOMPILED)
    assert seen["uncompiled"] == []
    assert seen["user"] == [10001, 10001]
    assert not seen["writable"]


@pytest.mark.parametrize("name", ["controller", "worker", "node"])
def test_the_bill_of_materials_is_of_what_is_installed(images: ImageTests, name: str) -> None:
    seen = images.python(name, INSTALLED)
    assert seen["billed"] == seen["installed"]
    assert any(one.startswith("fleetstart==") for one in seen["billed"])


def test_a_build_of_the_same_again_changes_nothing(images: ImageTests) -> None:
    base = next(row["base"] for row in json.loads(images.fs_image("ls", "--json").stdout) if row["name"] == "base")
    done = images.fs_image("build", "base", "--base", base, "--tag", "test", "--json")
    assert [image["unchanged"] for image in json.loads(done.stdout)] == [True]
    assert "unchanged" in done.stderr


# ── what can be wrong ──────────────────────────────────────────────────────────────────────────────


def test_a_base_that_cannot_be_pulled_is_said_with_what_to_do(images: ImageTests) -> None:
    done = images.fs_image("build", "base", "--base", "registry.invalid/python:3.11", "--tag", "broken", "--json")
    assert done.returncode == 1
    error = json.loads(done.stderr.splitlines()[-1])["error"]
    assert "registry.invalid" in error["hint"]
    assert "--base installed" in error["hint"]


def test_a_base_with_another_python_fails_the_build(images: ImageTests, tmp_path: Path) -> None:
    (tmp_path / "python3").write_text("#!/bin/sh\necho the base image has Python 3.9\nexit 1\n")
    (tmp_path / "python3").chmod(0o755)
    lines = ("FROM fleetstart-base:test", "USER 0", "COPY python3 /opt/fleetstart/bin/python3")
    (tmp_path / "Dockerfile").write_text("\n".join(lines))
    images.engine.docker("build", "--quiet", "--tag", "other-python", str(tmp_path))
    done = images.fs_image("build", "base", "--base", "other-python", "--tag", "broken")
    assert done.returncode == 1
    assert "the base image has Python 3.9" in done.stderr
    assert "error: building fleetstart-base:broken failed at Step" in done.stderr


def test_without_an_engine_its_address_is_named() -> None:
    done = run_fs("image", "ls", "--engine", "unix:///nowhere/docker.sock")
    assert done.returncode == 4
    assert "unix:///nowhere/docker.sock" in done.stderr
    assert "--engine" in done.stderr
    done = run_fs("image", "build", "--engine", "nowhere", "--json")
    assert done.returncode == 1
    assert "write its URL" in done.stderr
