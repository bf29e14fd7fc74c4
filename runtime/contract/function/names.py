"""Full names of functions: `NAME` in project `default`, `PROJECT.NAME` in any other project.

The full name is the identity of a function in URLs, Redis, ledger, logs and metrics. So a name belongs to one project
for ever, and two projects may both have a `greet`. The name itself has no dot, a project may have some: the last dot
separates. All characters are safe in URLs, file names, Redis keys and metric labels.
"""

from __future__ import annotations

import re

from ..ids import FunctionName

DEFAULT_PROJECT = "default"
"""The project of functions that name none."""
NAME_MAX = 63
"""Longest name of a function, and of a project."""
FULL_NAME_MAX = 2 * NAME_MAX + 1
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_PROJECT = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")


def is_function_name(text: str) -> bool:
    """Checks whether a function may have this name, written with or without its project."""
    project, dot, name = text.rpartition(".")
    return _NAME.fullmatch(name) is not None and (not dot or is_project_name(project))


def is_project_name(text: str) -> bool:
    return _PROJECT.fullmatch(text) is not None


def project_of(function: str) -> str:
    """The project of a function, by its full name."""
    return function.rpartition(".")[0] or DEFAULT_PROJECT


def full_name(name: str, project: str) -> FunctionName:
    """The full name of a function. `name` may be a full name already: then `project` does not count."""
    own, dot, bare = name.rpartition(".")
    if not dot:
        own = project
    return FunctionName(bare if own == DEFAULT_PROJECT else f"{own}.{bare}")


def means(written: str, function: str) -> bool:
    """Checks whether a name means the function of this full name: itself, or its name without the project."""
    return written in (function, function.rpartition(".")[2])
