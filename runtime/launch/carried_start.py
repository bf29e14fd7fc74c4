"""First script of the carried Python (`carried_python`): sets the paths of modules, then runs the worker.

Arguments: the folders of our packages. The image's own packages come after these, if they are for the same Python, so
that a function may import them and none of them replaces what the worker needs. The standard library alone.
"""

from __future__ import annotations

import os
import runpy
import sys

MODULE = "fleetstart.runtime.launch.container_worker"


def image_paths(environment: dict[str, str], python: str) -> list[str]:
    """Folders of an image that may have packages for a Python such as "python3.11"."""
    named = [path for path in environment.get("PYTHONPATH", "").split(":") if path.startswith("/")]
    prefixes = [environment.get("VIRTUAL_ENV", ""), "/usr/local", "/usr"]
    usual = [f"{prefix}/lib/{python}/site-packages" for prefix in prefixes if prefix.startswith("/")]
    debian = [f"/usr/local/lib/{python}/dist-packages", "/usr/lib/python3/dist-packages"]
    return [*named, *usual, *(debian if os.path.exists(f"/usr/bin/{python}") else [])]


def main() -> None:
    own = sys.argv[1:]
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    sys.path[:] = [*sys.path, *own, *filter(os.path.isdir, image_paths(dict(os.environ), python))]
    sys.argv = [MODULE]
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
