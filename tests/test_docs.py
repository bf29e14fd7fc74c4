"""docs/features.md promises tests: each one that it names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = [line for line in (ROOT / "docs" / "features.md").read_text().splitlines() if re.match(r"\| \d+ \|", line)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[2].strip())
def test_a_feature_has_the_tests_that_it_names(row: str) -> None:
    _, _, _, here, shown, _ = row.replace("\\|", "/").split("|")
    named = re.findall(r"\]\(\.\./([^)#]+)#(\w+)\)", shown)
    assert named or "not there" in here
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text())
        assert name in {
            node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
