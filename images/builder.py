"""Builds images in order: finds their packages, packs each context, has the engine build it."""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from .context import write_context
from .debian_root import write_root
from .definitions import IMAGES, INSTALLED_BASE, ImageDefinition, build_order, tag_of
from .distributions import OWN, closure, has_cuda, installed_extras, python_version
from .engine import NAME_LABEL, ImageEngine, ImageEngineError

TORCH_LABEL = "fleetstart.torch"
BASE_LABEL = "org.opencontainers.image.base.name"
LOCAL_BASE = "fleetstart-debian"
"""Repository of the base that is made of this machine's packages; its tag is that of the content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """One image that was built. `cached`: the engine had exactly it."""

    name: str
    tag: str
    id: str
    size_bytes: int
    packages: int
    took_s: float
    cached: bool


@dataclass(frozen=True, slots=True)
class _Packages:
    """Distributions of an image, and those of them that its parent lacks."""

    has: dict[str, metadata.Distribution]
    adds: dict[str, metadata.Distribution]


def build(
    names: Iterable[str], engine: ImageEngine, *, base: str, version: str, progress: Callable[[str, str], None]
) -> Iterator[Built]:
    """Builds the named images and their parents. `progress` gets an image's name and what is done for it. Errors:
    NotInstalled, NoDebian, ImageEngineError, BuildFailed."""
    order = build_order(names)
    packages = {
        image.name: _packages(image) for image in order
    }  # what is missing here is said before anything is built
    if base == INSTALLED_BASE:
        progress("base", "packing this machine's Debian packages")
        base = import_installed(engine)
    for image in order:
        yield _build_one(image, packages[image.name], engine, base, version, progress)


def import_installed(engine: ImageEngine) -> str:
    """Makes a base image of this machine's Debian packages, unless the engine has it; returns its name. Errors:
    NoDebian, ImageEngineError."""
    with tempfile.TemporaryDirectory(prefix="fs-base-") as folder:
        path = Path(folder) / "root.tar"
        write_root(path)
        with path.open("rb") as file:
            tag = f"{LOCAL_BASE}:{hashlib.file_digest(file, 'sha256').hexdigest()[:16]}"
            if engine.find(tag) is None:
                engine.import_root(tag, file)
    return tag


def _packages(image: ImageDefinition) -> _Packages:
    if not image.has_packages:
        return _Packages({}, {})
    has = closure([*image.extras, *installed_extras(image.optional_extras)])
    parent = IMAGES[image.parent]
    before = _packages(parent).has if parent.has_packages else {}
    return _Packages(has | before, {name: one for name, one in has.items() if name not in before})


def _build_one(
    image: ImageDefinition,
    packages: _Packages,
    engine: ImageEngine,
    base: str,
    version: str,
    progress: Callable[[str, str], None],
) -> Built:
    began_s = time.monotonic()
    cuda = has_cuda(packages.has)
    tag = tag_of(image, version, cuda=cuda)
    before = engine.find(tag)
    parent = tag_of(IMAGES[image.parent], version, cuda=cuda) if image.parent else base
    progress(image.name, "packing its packages" if packages.adds else "packing")
    context = write_context(
        image,
        adds=packages.adds,
        has=packages.has,
        progress=lambda done: progress(image.name, f"packing its packages: {done >> 20:,} MiB"),
    )
    arguments = {"PARENT" if image.parent else "BASE": parent, "PYTHON": python_version()}
    if image.has_torch:
        arguments["NVIDIA_VISIBLE_DEVICES"] = "all" if cuda else "void"
    with context.file:
        engine.build(
            tag,
            context.file,
            arguments=arguments,
            labels=_labels(image, packages, parent, version),
            progress=lambda line: progress(image.name, line),
        )
    made = engine.find(tag)
    if made is None:
        raise ImageEngineError(f"the container engine at {engine.address} built {tag}, and does not have it")
    return Built(
        name=image.name,
        tag=tag,
        id=made.id,
        size_bytes=made.size_bytes,
        packages=len(packages.has),
        took_s=time.monotonic() - began_s,
        cached=before is not None and before.id == made.id,
    )


def _labels(image: ImageDefinition, packages: _Packages, parent: str, version: str) -> dict[str, str]:
    torch = packages.has.get("torch")
    return {
        NAME_LABEL: image.name,
        TORCH_LABEL: torch.version if torch is not None else "",
        BASE_LABEL: parent,
        "org.opencontainers.image.title": image.repository,
        "org.opencontainers.image.description": image.summary,
        "org.opencontainers.image.version": version,
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.vendor": OWN,
    }
