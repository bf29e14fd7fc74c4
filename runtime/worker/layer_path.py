"""Puts a layer's packages on the import path of a worker.

They come after the bundle and the standard library, and before the packages of the node, of which a function thereby
has its own versions. A package that the fork server had imported is forgotten where the layer has one of its name: the
platform keeps using the one that it holds, the function imports its own.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Sequence

from ..contract.function.layer import top_level

SITE_FOLDERS = ("site-packages", "dist-packages")
SHARED = frozenset({"fleetstart", "msgspec"})
"""Modules of which platform and function need the same one: types of the one are checked by the other."""


def add_layer(layer_dir: str) -> None:
    """Adds the layer's folder to sys.path. Errors: OSError if it cannot be listed."""
    names = top_level(os.listdir(layer_dir))
    sys.path.insert(position(sys.path), layer_dir)
    importlib.invalidate_caches()
    for name in stale_modules(list(sys.modules), names - SHARED):
        del sys.modules[name]


def position(path: Sequence[str]) -> int:
    """Index before the first folder of installed packages; the end, if there is none."""
    return next((index for index, folder in enumerate(path) if folder.endswith(SITE_FOLDERS)), len(path))


def stale_modules(loaded: Iterable[str], names: frozenset[str]) -> list[str]:
    """Loaded modules that the layer has its own of. The standard library stays."""
    return [name for name in loaded if (top := name.partition(".")[0]) in names and top not in sys.stdlib_module_names]
