"""Imports the handler object (`module:attribute`) of a version from its bundle."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from typing import Any

from ..contract.errors import NoHandler


def import_entry(entry: str, bundle_dir: str) -> Any:
    """Imports `module:attribute`. Errors: NoHandler, and those of the module."""
    module_name, _, attribute = entry.partition(":")
    _check_name_is_free(module_name, bundle_dir)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise
        raise NoHandler(f"the bundle has no module {module_name!r}", hint="deploy the file that the entry names") from (
            error
        )
    if not hasattr(module, attribute):
        own = [name for name in vars(module) if not name.startswith("_")]
        near = difflib.get_close_matches(attribute, own, n=1)
        raise NoHandler(
            f"{module_name} has no {attribute!r}",
            hint=f"did you mean {near[0]!r}?" if near else "declare one with @function",
        )
    return getattr(module, attribute)


def _check_name_is_free(module_name: str, bundle_dir: str) -> None:
    """Errors: NoHandler for a module name in use: `queue.py` would resolve to the standard library's `queue`."""
    top = module_name.partition(".")[0]
    taken = sys.modules.get(top)
    path = os.path.join(bundle_dir, top)
    if taken is None or not (os.path.exists(path + ".py") or os.path.isdir(path)):
        return
    if not os.path.abspath(getattr(taken, "__file__", None) or "").startswith(os.path.abspath(bundle_dir) + os.sep):
        raise NoHandler(
            f"the name {top!r} is taken by a module of Python or of the platform",
            hint=f"rename {top}.py",
        )
