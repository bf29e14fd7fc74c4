"""The modules of a layer that a function imports: reported by one worker, imported ahead by those prepared after it.

Only modules of the layer are imported ahead, never the function's own: those may do anything, and may read secrets.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterable, Mapping
from types import ModuleType

from ..contract.function.layer import top_level
from ..contract.function.module_names import shallowest
from .layer_path import SHARED


def imported_modules(loaded: Mapping[str, ModuleType], layer_dir: str) -> list[str]:
    """Names of the loaded modules that lie in the layer, in the order of their import; at most as many as one message
    holds."""
    inside = os.path.join(layer_dir, "")
    return shallowest(name for name, module in list(loaded.items()) if _path(module).startswith(inside))


def import_modules(names: Iterable[str], layer_dir: str) -> None:
    """Imports modules of the layer; other names are passed over, and so is a module that fails: the function's own
    import tells why."""
    tops = top_level(os.listdir(layer_dir)) - SHARED
    for name in names:
        if name.partition(".")[0] in tops:
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(name)


def _path(module: ModuleType) -> str:
    """The file of a module, or the folder of a package without one. Does not wake a module that loads itself late."""
    try:
        fields = object.__getattribute__(module, "__dict__")
    except AttributeError:  # anything may stand in sys.modules
        return ""
    file = fields.get("__file__")
    return file if isinstance(file, str) else ""
