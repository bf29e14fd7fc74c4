"""Distributions of this environment that an image needs, with their files.

fleetstart's own files are found by its import paths, as an editable installation lists none of them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

OWN = "fleetstart"
ROOMS = ("client", "controller", "images", "native", "prefetcher", "runtime")
COMPILED = ("_core",)
"""Compiled modules. `_rdma` needs the host's RDMA libraries and devices, which a container has none of."""
OMITTED = frozenset({"pip", "setuptools", "uv", "wheel"})
"""Distributions that only build or install others."""
_SOURCES = (".cpp", ".hpp", ".pyi", ".txt", ".pyc", ".so")


class NotInstalled(OSError):
    """A distribution that an image needs is not in this environment."""


def closure(extras: Iterable[str]) -> dict[str, metadata.Distribution]:
    """fleetstart with its extras and all that they require here, by normalized name. Errors: NotInstalled."""
    found: dict[str, metadata.Distribution] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(OWN, extra, "") for extra in ("", *extras)]
    while waiting:
        name, extra, by = waiting.pop()
        if name in OMITTED or (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError as error:
            raise NotInstalled(f"{by or name} needs {name}, which is not installed here") from error
        found[name] = distribution
        for text in distribution.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                needed = canonicalize_name(requirement.name)
                asked_by = f"{name}[{extra}]" if extra else name
                waiting += [(needed, one, asked_by) for one in ("", *requirement.extras)]
    return dict(sorted(found.items()))


def installed_extras(extras: Iterable[str]) -> list[str]:
    """Those of the extras whose packages are all installed here."""
    found = []
    for extra in extras:
        try:
            closure([extra])
        except NotInstalled:
            continue
        found.append(extra)
    return found


def files_of(distribution: metadata.Distribution) -> Iterator[tuple[str, Path]]:
    """Paths below site-packages, of what `is_used`, and where they are here. Errors: NotInstalled for a distribution
    without a list of its files, as those of Debian's packages are."""
    if canonicalize_name(distribution.name) == OWN:
        yield from _own_files(distribution)
        return
    if distribution.files is None:
        raise NotInstalled(f"{distribution.name} is installed without a list of its files, so they cannot be packed")
    for file in distribution.files:
        path = str(file)
        if not is_used(path):
            continue
        source = Path(str(distribution.locate_file(file)))
        if source.is_file():
            yield path, source


def is_used(path: str) -> bool:
    """Checks by a distribution's path whether a running program may need it: tests, headers, archives of the linker and
    what lies outside site-packages (scripts, which name this environment's interpreter) are left out."""
    *folders, name = path.split("/")
    if {"..", "include", "test", "tests"} & set(folders) or name.endswith((".a", ".pyc")):
        return False
    return folders != ["torch", "bin"] or name == "torch_shm_manager"


def _own_files(distribution: metadata.Distribution) -> Iterator[tuple[str, Path]]:
    for room in ROOMS:
        spec = importlib.util.find_spec(f"{OWN}.{room}")
        for folder in spec.submodule_search_locations or () if spec is not None else ():
            for source in sorted(Path(folder).rglob("*")):
                if source.is_file() and not source.name.endswith(_SOURCES):
                    yield f"{OWN}/{room}/{source.relative_to(folder)}", source
    for module in COMPILED:
        spec = importlib.util.find_spec(f"{OWN}.native.{module}")
        if spec is None or spec.origin is None:
            raise NotInstalled(f"the compiled module {OWN}.native.{module} is not installed here")
        yield f"{OWN}/native/{Path(spec.origin).name}", Path(spec.origin)
    for file in distribution.files or ():
        path = str(file)
        if ".dist-info/" in path and not path.endswith(("RECORD", "direct_url.json")):
            yield path, Path(str(distribution.locate_file(file)))


def has_cuda(distributions: Iterable[str]) -> bool:
    """Checks by the names of distributions whether their torch is built for CUDA, whose libraries it then requires."""
    return any(name.startswith(("nvidia-cuda-runtime", "cuda-toolkit")) for name in distributions)


def python_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"
