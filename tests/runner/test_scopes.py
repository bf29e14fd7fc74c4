"""Scopes of end-to-end tests: files that share a system share a worker, and each benchmark has its own scope."""

from __future__ import annotations

from pathlib import Path

from tests.runner import scopes

ROOT = Path(__file__).parents[2]


def scope(nodeid: str) -> str:
    return scopes.ByFile._split_scope(object.__new__(scopes.ByFile), nodeid)


def test_files_that_are_listed_are_there() -> None:
    for file in (*scopes.ON_SHARED_SYSTEM, scopes.BENCHMARKS, scopes.COMMANDS, scopes.PIPELINES, scopes.IMAGES):
        assert (ROOT / file).exists(), file


def test_what_shares_a_system_shares_a_worker() -> None:
    shared = {scope(f"{file}::test_it[{number}]") for number, file in enumerate(scopes.ON_SHARED_SYSTEM)}
    assert shared == {scopes.SHARED_SYSTEM}
    assert scope("tests/e2e/images/test_a.py::test_it") == scope("tests/e2e/images/test_b.py::test_it")
    assert scope("tests/e2e/pipelines/test_a.py::test_it") == scope("tests/e2e/pipelines/test_b.py::test_it")
    assert scope(f"{scopes.BENCHMARKS}::test_it_runs[a]") != scope(f"{scopes.BENCHMARKS}::test_it_runs[b]")
    assert scope("tests/e2e/calls/test_a.py::test_it[1]") == "tests/e2e/calls/test_a.py"


def test_the_longest_begin_first_and_files_of_none_last() -> None:
    first = ("tests/e2e/pipelines/test_a.py", "tests/e2e/calls/test_chat.py", scopes.BENCHMARKS, scopes.COMMANDS)
    rest = ("tests/e2e/images/test_a.py", "tests/e2e/calls/test_volumes.py")
    places = [scopes.place(f"{file}::test_it") for file in (*first, *rest)]
    assert places == [0, 1, 2, 3, 4, 5]
