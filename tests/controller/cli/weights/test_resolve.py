"""Which checkpoint is meant by what people type."""

from __future__ import annotations

import pytest

from fleetstart.controller.cli.weights.resolve import choose_checkpoint
from fleetstart.controller.schemas.functions import CheckpointInfo, FunctionInfo
from fleetstart.runtime.contract.errors import InvalidInput, NotFound
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import BundleId, CheckpointId, FunctionName, Version

ONE, TWO, THREE = (CheckpointId(start.ljust(64, "0")) for start in ("abcd1", "abcd2", "1234"))


def checkpoint(id: CheckpointId) -> CheckpointInfo:
    return CheckpointInfo(
        id=id, complete=True, problem="", weight_bytes=1, object_bytes=1, tensors=1, files=0, parts=1, adapter=False,
        created_unix_ms=0, used_by=[],
    )  # fmt: skip


def function(name: str, weights: CheckpointId | None) -> FunctionInfo:
    spec = FunctionSpec(name=FunctionName(name), bundle=BundleId("b"), entry="a:b", weights=weights)
    return FunctionInfo(
        name=spec.name, version=Version(1), url="", spec=spec, deployed_unix_ms=0, workers=[], queued=0, running=0
    )


CHECKPOINTS = [checkpoint(id) for id in (ONE, TWO, THREE)]
FUNCTIONS = [
    function("chat", ONE),
    function("hello", None),
    function("1234", ONE),
    function("gone", CheckpointId("9" * 64)),
]


@pytest.mark.parametrize(
    ("text", "found"),
    [(ONE, ONE), ("abcd1", ONE), ("ABCD2", TWO), ("12340", THREE), ("chat", ONE), (" abcd10 ", ONE)],
)
def test_what_is_found(text: str, found: CheckpointId) -> None:
    assert choose_checkpoint(text, CHECKPOINTS, FUNCTIONS).id == found


@pytest.mark.parametrize(
    ("text", "error", "says", "hint"),
    [
        ("abcd", InvalidInput, "is a prefix of 2 checkpoints: abcd10000000, abcd20000000", "more digits"),
        ("abc", InvalidInput, "too short for an id", "4 digits"),
        ("1234", InvalidInput, "is a function, and a prefix of checkpoint 123400000000", "123400000000"),
        ("abcd3", NotFound, "no checkpoint 'abcd3'", "did you mean 'abcd"),
        ("chatt", NotFound, "no checkpoint 'chatt'", "did you mean 'chat'?"),
        ("hello", NotFound, "function hello has no weights", "fs weights ls"),
        ("gone", NotFound, "999999999999, are not in the store", "fs deploy"),
        ("zzz", NotFound, "no checkpoint 'zzz'", "`fs weights ls` lists"),
        ("", NotFound, "no checkpoint ''", "lists"),
        ("../x", NotFound, "no checkpoint '../x'", "lists"),
    ],
)
def test_what_is_not_found_is_said(text: str, error: type[Exception], says: str, hint: str) -> None:
    with pytest.raises(error) as caught:
        choose_checkpoint(text, CHECKPOINTS, FUNCTIONS)
    assert says in str(caught.value)
    assert hint in getattr(caught.value, "hint", "")


def test_an_empty_store_says_how_to_fill_it() -> None:
    with pytest.raises(NotFound) as error:
        choose_checkpoint("abcd", [], [])
    assert "fs weights push" in error.value.hint
