"""Names of modules that a worker reports and another one imports ahead: bounds and form, checked on both sides."""

from __future__ import annotations

from collections.abc import Iterable

MODULES_MAX = 600
"""Most modules of one list. A package imports its own modules: the shallow names bring nearly all others."""
NAME_MAX = 160


def is_module_name(name: str) -> bool:
    return len(name) <= NAME_MAX and all(part.isidentifier() for part in name.split("."))


def shallowest(names: Iterable[str]) -> list[str]:
    """At most MODULES_MAX of the names, the shallowest, in their order."""
    allowed = [name for name in names if is_module_name(name)]
    if len(allowed) <= MODULES_MAX:
        return allowed
    kept = set(sorted(allowed, key=lambda name: name.count("."))[:MODULES_MAX])
    return [name for name in allowed if name in kept]
