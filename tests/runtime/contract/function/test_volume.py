"""Volumes of a spec, and the compare-and-set of their versions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract.errors import Conflict, InvalidInput, InvalidSpec, NotFound
from fleetstart.runtime.contract.function.volume import (
    VERSIONS_MAX,
    VolumeRecord,
    VolumeRef,
    VolumeVersion,
    check_volumes,
    parse_volume,
    with_version,
)
from fleetstart.runtime.contract.ids import LayerId

EMPTY = VolumeRecord(name="index", project="default", created_unix_ms=1, created_by="local")


def version(tree: str = "a") -> VolumeVersion:
    return VolumeVersion(
        number=0, tree=LayerId(tree), size_bytes=1, files=1, new_bytes=1, created_unix_ms=1, created_by="local"
    )


@pytest.mark.parametrize(
    ("text", "ref"),
    [
        ("index", VolumeRef("index")),
        ("index@2", VolumeRef("index", 2)),
        ("index:rw", VolumeRef("index", None, True)),
        ("hf-cache-1", VolumeRef("hf-cache-1")),
    ],
)
def test_a_volume_is_named_with_its_version_or_its_mode(text: str, ref: VolumeRef) -> None:
    assert parse_volume(text) == ref


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Index",
        "../x",
        "a/b",
        "search.index",
        "index@",
        "index@0",
        "index@-1",
        "index@x",
        "index:",
        "index:ro",
        "index@1:rw",
    ],
)
def test_what_is_no_volume_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        parse_volume(text)
    assert caught.value.hint


def test_a_volume_twice_too_many_and_one_of_an_llm_are_refused() -> None:
    check_volumes(["a", "b:rw"], has_code=True)
    with pytest.raises(InvalidSpec, match="named twice"):
        check_volumes(["a", "a@1"], has_code=True)
    with pytest.raises(InvalidSpec, match="16 volumes at most"):
        check_volumes([f"v{number}" for number in range(17)], has_code=True)
    with pytest.raises(InvalidSpec, match="LLM"):
        check_volumes(["a"], has_code=False)


@given(bases=st.lists(st.integers(0, 4), max_size=20))
def test_only_a_change_of_the_newest_version_is_taken_and_numbers_grow(bases: list[int]) -> None:
    record = EMPTY
    for base in bases:
        newest = record.latest.number if record.latest is not None else 0
        if base == newest:
            record = with_version(record, base, version())
            assert record.latest is not None
            assert record.latest.number == newest + 1
        else:
            with pytest.raises(Conflict, match="is the newest"):
                with_version(record, base, version())
    assert [one.number for one in record.versions] == list(range(1, len(record.versions) + 1))


def test_numbers_of_removed_versions_are_not_given_again() -> None:
    record = with_version(with_version(EMPTY, 0, version()), 1, version("b"))
    pruned = VolumeRecord(
        name="index", project="default", versions=record.versions[:1], last=2, created_unix_ms=1, created_by=""
    )
    added = with_version(pruned, 1, version("c")).latest
    assert added is not None
    assert added.number == 3


def test_too_many_versions_are_refused_with_what_to_do() -> None:
    full = VolumeRecord(
        name="index", project="default", versions=[version()] * VERSIONS_MAX, last=0, created_unix_ms=1, created_by=""
    )
    with pytest.raises(InvalidInput) as caught:
        with_version(full, 0, version())
    assert "fs volume prune index" in caught.value.hint


def test_versions_that_there_are_not_are_named() -> None:
    with pytest.raises(NotFound, match="no version yet"):
        EMPTY.version(None)
    with pytest.raises(NotFound, match="no version 7"):
        EMPTY.version(7)
