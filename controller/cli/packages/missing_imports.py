"""Finds imports of a handler that its workers will not find: neither in the bundle, nor in its layer, nor installed.

Only what the handler imports is looked at, with the modules of the bundle that it leads to: a test file beside it may
import what it likes. An import that the handler is prepared to miss (`try: ... except ImportError`) or that is for type
checkers only is no error. "Installed" is the environment of this command, which on one machine is that of the workers.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

PLATFORM = "fleetstart"


class MissingImport(NamedTuple):
    """An import that finds nothing: the file, its line, the module's top-level name."""

    file: str
    line: int
    module: str


def missing_imports(
    entry: str, sources: Mapping[str, ast.Module], layer: Collection[str], is_installed: Callable[[str], bool]
) -> list[MissingImport]:
    """The first import of each module that is missing. `entry`: the handler's file; `sources`: the bundle's files."""
    own = {name.removesuffix(".py").removesuffix("/__init__").partition("/")[0] for name in sources}
    known = sys.stdlib_module_names | own | set(layer) | {PLATFORM}
    found: dict[str, MissingImport] = {}
    seen, waiting = {entry}, [entry]
    while waiting:
        file = waiting.pop()
        for line, module in _imports(sources[file]):
            top = module.partition(".")[0]
            if top not in known and top not in found and not is_installed(top):
                found[top] = MissingImport(file, line, top)
            for other in _files_of(module, sources):
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)
    return sorted(found.values())


def is_installed(module: str) -> bool:
    """Checks whether this environment has a module of that name, which is not imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def _files_of(module: str, sources: Mapping[str, ast.Module]) -> Iterator[str]:
    """The bundle's files that an import of a module runs."""
    parts = module.split(".")
    for length in range(1, len(parts) + 1):
        path = "/".join(parts[:length])
        yield from (name for name in (f"{path}.py", f"{path}/__init__.py") if name in sources)


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module) of each import that must succeed, wherever it stands."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        match node:
            case ast.Import():
                yield from ((node.lineno, alias.name) for alias in node.names)
            case ast.ImportFrom(module=str() as module, level=0):
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
            case ast.Try() if any(_catches_imports(handler) for handler in node.handlers):
                waiting += [*node.handlers, *node.orelse, *node.finalbody]
                continue
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                waiting += node.orelse
                continue
        waiting += ast.iter_child_nodes(node)


def _catches_imports(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = {one.id for one in caught if isinstance(one, ast.Name)}
    return None in caught or bool(names & {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})
