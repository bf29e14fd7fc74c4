"""The page on the life of a call names files and functions that exist, and few of them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"\| \[(\S+\.py)\]\(\.\./(\S+)\) \| (.+?) \|")
FILES_MAX = {"controller": 10, "runtime": 5}


def rows() -> list[tuple[str, list[str]]]:
    text = (ROOT / "docs/design-life-of-a-call.md").read_text()
    found = ROW.findall(text)
    assert len(found) == sum(line.startswith("| [") for line in text.splitlines())
    assert all(shown == target for shown, target, _ in found)
    return [(path, re.findall(r"`([^`]+)`", functions)) for path, _, functions in found]


def defined(path: str) -> set[str]:
    names = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{one.name}"
                for one in node.body
                if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return names


def test_each_file_and_function_of_the_page_exists() -> None:
    for path, functions in rows():
        assert functions, path
        assert set(functions) <= defined(path), path


def test_a_warm_call_is_followed_through_few_files() -> None:
    paths = [path for path, _ in rows()]
    assert len(paths) == len(set(paths))
    for room, most in FILES_MAX.items():
        assert sum(path.startswith(room + "/") for path in paths) <= most, room
    assert len(paths) <= sum(FILES_MAX.values())
