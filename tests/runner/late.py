"""Large packages that tests import when they use them: workers that run none of these tests do without the import."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest


def late(name: str) -> Any:
    """The package, imported at its first use. Skips the file of tests where it is not installed."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)
    return _Late(name)


class _Late:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks at all that a file has for marks of its own, as it collects
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
