"""The table of end-to-end tests that some isolations leave out, made from the mark `isolations` of each."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from tests.docs.pages import ROOT

ALL = ("namespaces", "gvisor", "container")


def markdown_table() -> str:
    """A row for each reason: what is left out, with which isolations."""
    rows: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests" / "e2e").rglob("test_*.py")):
        place = path.relative_to(ROOT / "tests" / "e2e").as_posix()
        for test, mark in _marks(ast.parse(path.read_text())):
            kept = [ast.literal_eval(name) for name in mark.args]
            (why,) = (ast.literal_eval(word.value) for word in mark.keywords if word.arg == "why")
            out = ", ".join(name for name in ALL if name not in kept)
            rows[out, why].append(f"[{test or place}](../tests/e2e/{place}{f'#{test}' if test else ''})")
    lines = ["| left out | with | because |", "| --- | --- | --- |"]
    lines += [f"| {', '.join(what)} | {out} | {why} |" for (out, why), what in sorted(rows.items())]
    return "\n".join(lines)


def _marks(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """(test, mark) of a file; no test for the mark of all its tests."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield from ((node.name, mark) for one in node.decorator_list for mark in _of(one))
        elif isinstance(node, ast.Assign) and any(
            isinstance(name, ast.Name) and name.id == "pytestmark" for name in node.targets
        ):
            yield from (("", mark) for mark in _of(node.value))


def _of(expression: ast.expr) -> Iterator[ast.Call]:
    for node in ast.walk(expression):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "isolations":
            yield node
