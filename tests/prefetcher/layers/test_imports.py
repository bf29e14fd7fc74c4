"""The lists of imported modules beside a layer: bounded, checked, lost without harm."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from fleetstart.prefetcher.layers.imports import FUNCTIONS_MAX, IMPORTS, learn_imports, read_imports, with_imports
from fleetstart.runtime.contract.function.module_names import MODULES_MAX, is_module_name, shallowest
from fleetstart.runtime.contract.ids import FunctionName

F = FunctionName("f")


def test_what_was_learned_is_read_again_and_replaced(tmp_path: Path) -> None:
    learn_imports(tmp_path, F, ["a", "a.b"])
    learn_imports(tmp_path, FunctionName("g"), ["c"])
    learn_imports(tmp_path, F, ["a"])
    assert read_imports(tmp_path) == {"g": ["c"], "f": ["a"]}
    (tmp_path / IMPORTS).write_text('{"f": [1')
    assert read_imports(tmp_path) == {}


@given(st.lists(st.text(max_size=200) | st.sampled_from(["os", "a.b", "x" * 161, "../x", "a..b"]), max_size=50))
def test_only_names_of_modules_are_kept(names: list[str]) -> None:
    kept = with_imports({}, F, names)[F]
    assert all(is_module_name(name) for name in kept)
    assert kept == [name for name in names if name in kept]


def test_of_too_many_modules_the_shallow_ones_are_kept_in_their_order() -> None:
    names = [f"p{number}.deep.er" for number in range(MODULES_MAX)] + ["top", "top.one"]
    kept = shallowest(names)
    assert len(kept) == MODULES_MAX
    assert kept[-2:] == ["top", "top.one"]
    assert kept[0] == "p0.deep.er"


def test_the_latest_functions_are_remembered() -> None:
    known: dict[FunctionName, list[str]] = {}
    for number in range(FUNCTIONS_MAX + 5):
        known = with_imports(known, FunctionName(f"f{number}"), ["a"])
    assert len(known) == FUNCTIONS_MAX
    assert FunctionName("f0") not in known
