"""`fs image`: builds the container images of fleetstart on an engine of this machine, and lists them."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from fleetstart.runtime.contract.errors import FleetError, InvalidInput, StartFailed

from .. import output
from ..command_group import CommandGroup
from ..output import Unreachable
from ..root import verb

if TYPE_CHECKING:
    from fleetstart.images.engine import ImageEngine

SOCKET = "unix:///var/run/docker.sock"
ENGINE = click.option(
    "--engine",
    default="",
    envvar="FS_CONTAINER_ENGINE",
    metavar="URL",
    help="The engine's API; default FS_CONTAINER_ENGINE, DOCKER_HOST, then unix:///var/run/docker.sock.",
)
IMAGE_NAMES = ("base", "controller", "worker", "node")
LINE_EVERY_S = 5.0
"""Pause between lines on what a build does."""


@click.group(cls=CommandGroup, context_settings={"max_content_width": 100})
def command() -> None:
    """Container images of fleetstart: build and list them. Each command has --json."""


@command.command
@click.argument("names", nargs=-1, metavar="[base|controller|worker|node]...", type=click.Choice(IMAGE_NAMES))
@click.option(
    "--base",
    default="",
    metavar="IMAGE",
    help="Debian with Python, such as python:3.11-slim-bookworm, the default for this Python; "
    "`installed`: of this machine's own Debian packages.",
)
@click.option("--tag", default="", help="Version in the images' names; default: that of fleetstart.")
@ENGINE
@verb(server=False)
def build(*, names: tuple[str, ...], base: str, tag: str, engine: str, as_json: bool) -> None:
    """Build images from the packages of this environment; prints their names.

    Without a name all are built, and with one those that it is built on, too. What is installed here goes into them,
    version by version; the build itself has no network. With a torch for CUDA, worker and node are images for CUDA,
    with -cuda in their tags.

    \b
    fs image build node --base registry.example.com/python:3.11-slim
    """
    images = _images()
    progress = _Progress()
    made = []
    version = tag or _version()
    with closing(_engine(engine)) as client:
        try:
            building = images.builder.build(
                names, client, base=base or images.definitions.DEFAULT_BASE, version=version, progress=progress
            )
            for image in building:
                made.append(image)
                took = "unchanged" if image.cached else f"built in {image.took_s:.1f} s"
                output.message(f"{image.name}: {took}, {output.format_size(image.size_bytes)}")
                if not as_json:
                    output.data(image.tag)
        except OSError as error:
            raise _failure(error, base) from error
    if as_json:
        output.json_data(
            [
                {
                    "name": image.name, "tag": image.tag, "id": image.id, "size_bytes": image.size_bytes,
                    "packages": image.packages, "took_s": round(image.took_s, 3), "unchanged": image.cached,
                }
                for image in made
            ]
        )  # fmt: skip


@command.command("ls")
@ENGINE
@verb(server=False)
def list_images(*, engine: str, as_json: bool) -> None:
    """List the images that `fs image build` made on an engine, the newest first."""
    images = _images()
    with closing(_engine(engine)) as client:
        try:
            found = client.images()
        except OSError as error:
            raise _failure(error, "") from error
    rows: list[dict[str, Any]] = [
        {
            "name": image.name, "tag": tag, "id": image.id, "size_bytes": image.size_bytes,
            "created_unix_s": int(image.created_unix_s), "torch": image.labels.get(images.builder.TORCH_LABEL, ""),
            "base": image.labels.get(images.builder.BASE_LABEL, ""),
        }
        for image in found
        for tag in image.tags
    ]  # fmt: skip
    if as_json:
        output.json_data(rows)
        return
    if not rows:
        output.message("no images yet: fs image build")
        return
    now_s = time.time()
    cells = [
        (
            row["tag"], output.format_size(row["size_bytes"]),
            output.format_age(max(0.0, now_s - row["created_unix_s"])),
            row["torch"] or "-", row["base"], row["id"].removeprefix("sha256:")[:12],
        )
        for row in rows
    ]  # fmt: skip
    output.data(output.table(("IMAGE", "SIZE", "AGE", "TORCH", "BUILT ON", "ID"), cells, right=frozenset({1, 2})))


class _Progress:
    """What a build does, at most every few seconds, and each step of its build file."""

    def __init__(self) -> None:
        self._next_s = time.monotonic() + LINE_EVERY_S

    def __call__(self, name: str, line: str) -> None:
        now_s = time.monotonic()
        if line.startswith("Step ") or now_s >= self._next_s:
            self._next_s = now_s + LINE_EVERY_S
            output.message(f"{name}: {line}")


def _images() -> Any:
    """The modules of images. Errors: StartFailed, if their libraries are not installed."""
    try:
        import fleetstart.images.builder
        import fleetstart.images.definitions
        import fleetstart.images.engine
    except ImportError as error:
        raise StartFailed(
            f"images cannot be built with what is installed here: {error}", hint="pip install 'fleetstart[container]'"
        ) from error
    return fleetstart.images


def _engine(address: str) -> ImageEngine:
    """The engine of the option, of Docker's own variable, or of this machine. Errors: Unreachable."""
    chosen = address or os.environ.get("DOCKER_HOST") or SOCKET
    if "://" not in chosen:
        raise InvalidInput(f"the engine's address is {chosen!r}", hint=f"write its URL, such as {SOCKET}")
    open_engine: Callable[[str], ImageEngine] = _images().engine.ImageEngine
    try:
        return open_engine(chosen)
    except OSError as error:
        raise Unreachable(
            str(error), hint="start the engine, or name its socket with --engine or FS_CONTAINER_ENGINE"
        ) from error


def _failure(error: OSError, base: str) -> FleetError:
    """The error of a build, with what to do next."""
    images = _images()
    if isinstance(error, images.engine.BuildFailed):
        for line in error.log:
            output.message(f"    {line}")
        text = str(error)
        hint = "the lines above are the end of the build's log"
        if any(word in text for word in ("pull access", "dial tcp", "no such host", "not found", "i/o timeout")):
            hint = (
                f"the engine cannot pull {base or images.definitions.DEFAULT_BASE}: name another with --base, load it "
                "with `docker load`, or make one of this machine's Debian packages with --base installed"
            )
        return StartFailed(text, hint=hint)
    if isinstance(error, images.distributions.NotInstalled):
        return StartFailed(
            str(error),
            hint="install what the image needs here: pip install 'fleetstart[server,container,model]'",
        )
    if isinstance(error, images.debian_root.NoDebian):
        return StartFailed(str(error), hint="name a base image that the engine has or can pull: --base IMAGE")
    if isinstance(error, images.engine.ImageEngineError):
        return Unreachable(str(error), hint="look at the engine's log; `docker info` asks it, too")
    if error.errno == errno.ENOSPC:
        hint = "a build packs each image in a temporary file, as large as its packages: set TMPDIR to a disk with room"
        return StartFailed(f"the packages cannot be packed: {error}", hint=hint)
    return StartFailed(f"the packages cannot be read: {error}", hint="was one of them changed during the build?")


def _version() -> str:
    from importlib.metadata import version  # late: it is slow to import

    return version("fleetstart")
