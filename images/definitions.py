"""Table of the images, and the order in which they are built. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

PREFIX = "fleetstart-"
DEFAULT_BASE = f"python:{sys.version_info.major}.{sys.version_info.minor}-slim-bookworm"
"""Base of the base: Debian with the Python of this environment, whose compiled packages go into the images."""
INSTALLED_BASE = "installed"
"""Name for a base made of this machine's own Debian packages, where no registry is reached."""
CUDA_SUFFIX = "-cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageDefinition:
    """One image: what it is built on, and the extras of fleetstart whose packages it adds."""

    name: str
    summary: str
    parent: str = ""
    extras: tuple[str, ...] = ()
    optional_extras: tuple[str, ...] = ()
    """Extras that are left out where they are not installed."""
    has_packages: bool = True
    has_fs: bool = False
    """True if the command line is in it."""
    has_torch: bool = False

    @property
    def repository(self) -> str:
        return f"{PREFIX}{self.name}"


IMAGES = {
    image.name: image
    for image in (
        ImageDefinition(name="base", summary="Python and an unprivileged user", has_packages=False),
        ImageDefinition(
            name="controller",
            summary="gateway, management API and scheduler",
            parent="base",
            extras=("server",),
            optional_extras=("otel",),
            has_fs=True,
        ),
        ImageDefinition(
            name="worker",
            summary="what functions with models run from; a base for images of your own",
            parent="base",
            extras=("model",),
            has_torch=True,
        ),
        ImageDefinition(
            name="node",
            summary="node daemon, with its workers",
            parent="worker",
            extras=("model", "server", "container"),
            optional_extras=("gpu",),
            has_fs=True,
            has_torch=True,
        ),
    )
}


def build_order(names: Iterable[str]) -> list[ImageDefinition]:
    """The named images and those that they are built on, parents first. No name: all images."""
    wanted = set(names) or set(IMAGES)
    for name in tuple(wanted):
        while parent := IMAGES[name].parent:
            wanted.add(parent)
            name = parent
    return [image for image in IMAGES.values() if image.name in wanted]


def tag_of(image: ImageDefinition, version: str, *, cuda: bool) -> str:
    """Full name of an image; those with torch for CUDA are told from those for processors by their tag."""
    return f"{image.repository}:{version}{CUDA_SUFFIX if cuda and image.has_torch else ''}"
