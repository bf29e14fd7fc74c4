"""Parses Python source into a syntax tree, with readable errors; lists its imports. Nothing is run."""

from __future__ import annotations

import ast
import warnings

from fleetstart.runtime.contract.errors import HandlerSyntax

SOURCE_MAX_BYTES = 4 * 1024 * 1024


def parse(source: bytes, name: str) -> ast.Module:
    """The syntax tree. Errors: HandlerSyntax with line, column and a caret."""
    if len(source) > SOURCE_MAX_BYTES:
        raise HandlerSyntax(f"{name} has {len(source)} bytes, {SOURCE_MAX_BYTES} at most for a source file")
    try:
        with warnings.catch_warnings():
            # A warning about the handler's source (an invalid escape) belongs to its run time.
            warnings.simplefilter("ignore")
            return ast.parse(source, filename=name)
    except SyntaxError as error:
        raise HandlerSyntax(_described(error, name)) from error
    except (RecursionError, MemoryError) as error:
        raise HandlerSyntax(f"{name}: nested too deeply to be read") from error
    except ValueError as error:
        raise HandlerSyntax(f"{name}: {error}") from error


def _described(error: SyntaxError, name: str) -> str:
    where = f"{name}:{error.lineno or 1}:{error.offset or 1}: {error.msg}"
    if not error.text:
        return where
    line = error.text.rstrip("\n")
    bare = line.lstrip()
    column = max(0, (error.offset or 1) - 1 - (len(line) - len(bare)))
    return f"{where}\n    {bare}\n    {' ' * column}^"


def imports_of(tree: ast.Module) -> set[str]:
    """Top-level names of all modules that the source imports, wherever the import stands."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.partition(".")[0])
    return names
