"""matplotlib, which only charts need, without a display."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def load_pyplot() -> Any:
    """The module `matplotlib.pyplot`. Ends the process with a word where there is no matplotlib."""
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
    except ModuleNotFoundError:
        sys.exit("no matplotlib to draw with: pip install 'matplotlib>=3.8'")
    matplotlib.use("agg")
    return importlib.import_module("matplotlib.pyplot")
