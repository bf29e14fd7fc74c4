"""Each cell of the table of model families is shown by a test that there is, or says that it is not run."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from fleetstart.runtime.contract.weights.model_families import FAMILIES
from tests.docs import model_support
from tests.docs.model_support import CASES, COLUMNS, NOT_RUN

pytest.importorskip("torch")


def cases_of(test: Any) -> set[str]:
    """The cases that a test function is parametrised with."""
    return {
        case
        for mark in test.pytestmark
        if mark.name == "parametrize" and mark.args[0] == "case"
        for case in mark.args[1]
    }


def test_every_family_of_the_engine_has_a_row() -> None:
    assert set(CASES) == set(FAMILIES)
    assert all(f"`{model_type}`" in model_support.markdown_table() for model_type in FAMILIES)


@pytest.mark.parametrize("column", COLUMNS, ids=[column.title for column in COLUMNS])
def test_each_cell_is_shown_by_a_test_or_not_run(column: model_support.Column) -> None:
    assert bool(column.test) is (column.shown != NOT_RUN)
    if column.test:
        module = import_module(f"tests.runtime.llm.{column.file.removesuffix('.py').replace('/', '.')}")
        assert set(CASES.values()) <= cases_of(getattr(module, column.test))
