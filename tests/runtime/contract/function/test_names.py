"""Full names of functions: one name for each function of each project, and its parts again from it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract.errors import InvalidSpec
from fleetstart.runtime.contract.function.names import (
    DEFAULT_PROJECT,
    FULL_NAME_MAX,
    full_name,
    is_function_name,
    is_project_name,
    means,
    project_of,
)
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import BundleId, FunctionName

names = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True)
projects = st.from_regex(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?", fullmatch=True) | st.just(DEFAULT_PROJECT)


@given(name=names, project=projects, other=projects)
def test_a_full_name_has_one_project_and_one_name(name: str, project: str, other: str) -> None:
    full = full_name(name, project)
    assert (project_of(full), full.rpartition(".")[2]) == (project, name)
    assert full_name(f"{project}.{name}", other) == full, "a project in the name decides"
    assert is_function_name(full)
    assert len(full) <= FULL_NAME_MAX
    assert re.fullmatch(r"[a-z0-9._-]+", full), "safe in URLs, file names, Redis keys and metrics"
    assert "." in full or full_name(full, other) == full_name(name, other)


@given(one=st.tuples(names, projects), other=st.tuples(names, projects))
def test_two_functions_never_share_a_full_name(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (full_name(*one) == full_name(*other)) == (one == other)


@pytest.mark.parametrize(
    "name", ["", ".", ".greet", "ml.", "ml..greet", "-x", "a/b", "ml.Greet", "a@1", f"{'a' * 64}.b"]
)
def test_names_that_are_refused(name: str) -> None:
    assert not is_function_name(name)
    with pytest.raises(InvalidSpec, match="is not allowed"):
        FunctionSpec(name=FunctionName(name), bundle=BundleId("0" * 64), entry="handler:run")


def test_a_model_may_be_asked_for_without_its_project() -> None:
    assert all(means(written, "ml.chat") for written in ("ml.chat", "chat"))
    assert not any(means(written, "ml.chat") for written in ("other.chat", "ml", "", "chat.ml"))


def test_a_spec_whose_name_and_project_differ_is_refused() -> None:
    FunctionSpec(name=FunctionName("ml.greet"), bundle=BundleId("0" * 64), entry="handler:run", project="ml")
    with pytest.raises(InvalidSpec, match=r"function ml.greet is in project ml, and its setting names other"):
        FunctionSpec(name=FunctionName("ml.greet"), bundle=BundleId("0" * 64), entry="handler:run", project="other")
    assert not is_project_name("a/b")
