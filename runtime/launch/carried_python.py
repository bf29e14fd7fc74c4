"""The node's Python as it is carried into an image of a user: mounted read-only in a folder of its own.

An image need have nothing for us: the interpreter runs under the node's own loader with the node's own C library, which
may be newer than that of the image, or of another kind. All lies below CARRIED, as folders of an image on the way to
the node's own paths may be closed to other users. Programs of the image run as ever: no variable points here.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..contract.function.layer import LAYER_DIR
from ..isolation.root import Mount, interpreter_paths, library_folder

CARRIED = "/run/fleetstart-python"
START = "launch/carried_start.py"
"""The script that runs first, in the package `runtime`."""


class NoLoader(OSError):
    """This interpreter has no loader of its own (it is linked statically), and cannot be carried."""


@dataclass(frozen=True, slots=True)
class CarriedPython:
    """Mounts, and the command that runs the worker from them."""

    mounts: tuple[Mount, ...]
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """Where an interpreter has its parts on the node."""

    program: str
    version: str
    """Such as "python3.11"."""
    library: str
    """Folder of its standard library."""
    loader: str
    libraries: tuple[str, ...]
    """Folders of the shared libraries that it has loaded."""
    packages: tuple[str, ...]
    """Folders of installed packages."""
    own: tuple[tuple[str, str], ...]
    """Paths in the package fleetstart that the packages' folders do not have, and where they are: in an editable
    installation."""


def plan_carried(python: Interpreter) -> CarriedPython:
    """Mounts of an interpreter, and its command. Pure."""
    libraries = [Mount(f"{CARRIED}/lib/{place}", folder) for place, folder in enumerate(python.libraries)]
    packages = [Mount(f"{CARRIED}/packages/{place}", folder) for place, folder in enumerate(python.packages)]
    own = [Mount(f"{CARRIED}/own/fleetstart/{path}", source) for path, source in python.own]
    program = f"{CARRIED}/python/bin/{python.version}"
    mounts = (
        Mount(program, python.program),
        Mount(f"{CARRIED}/python/lib/{python.version}", python.library),
        Mount(f"{CARRIED}/loader", python.loader),
        Mount(LAYER_DIR),  # where packages of the function are mounted at its assignment
        *libraries,
        *packages,
        *own,
    )
    paths = [*([f"{CARRIED}/own"] if own else []), *(mount.path for mount in packages)]
    start = next(
        f"{mount.path}/{START}" if mount.path.endswith("/runtime") else f"{mount.path}/fleetstart/runtime/{START}"
        for mount in (*own, *packages)
        if mount.path.endswith("/runtime") or not own
    )
    command = (
        *(f"{CARRIED}/loader", "--library-path", ":".join(mount.path for mount in libraries)),
        # No variable of the image steers this interpreter, and it looks for no packages by itself.
        *(program, "-I", "-S", "-B", start, *paths),
    )
    return CarriedPython(mounts, command)


def this_interpreter(library_path: str) -> Interpreter:
    """The interpreter of this process. `library_path`: LD_LIBRARY_PATH. Errors: NoLoader."""
    loaded = _mapped_files()
    loader = next((path for path in loaded if os.path.basename(path).startswith(("ld-linux", "ld-musl", "ld64"))), "")
    if not loader:
        raise NoLoader("this Python has no loader of shared libraries, and cannot be carried into an image")
    library = os.path.realpath(os.path.dirname(os.__file__))
    packages = [path for path in interpreter_paths(library_path) if path.endswith(("site-packages", "dist-packages"))]
    folders = {os.path.dirname(path) for path in loaded if path != loader}
    system = [folder for folder in folders if not _below(folder, (*packages, library))]
    return Interpreter(
        program=os.path.realpath(sys.executable),
        version=f"python{sys.version_info.major}.{sys.version_info.minor}",
        library=library,
        loader=loader,
        libraries=tuple(sorted({library_folder(f"{folder}/x.so") for folder in system} | {os.path.dirname(loader)})),
        packages=tuple(packages),
        own=tuple(_editable_parts(packages)),
    )


def _editable_parts(packages: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Parts of the package that a worker needs, file by file where a folder's lie in two places."""
    runtime = str(Path(__file__).resolve().parents[1])
    if _below(runtime, packages):
        return
    yield "runtime", runtime
    spec = importlib.util.find_spec("fleetstart.native")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for file in sorted(Path(folder).iterdir()):
            if file.suffix in (".py", ".so"):
                yield f"native/{file.name}", os.path.realpath(file)


def _below(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def _mapped_files() -> list[str]:
    """Shared libraries and loader that this process has mapped, by their real paths."""
    with open("/proc/self/maps") as lines:
        files = {line.split(maxsplit=5)[5].strip() for line in lines if ".so" in line and "/" in line}
    return sorted(path for path in files if path.startswith("/") and os.path.isfile(path))
