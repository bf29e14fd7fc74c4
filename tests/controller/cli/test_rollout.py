"""What a deploy says of a version that is being tried."""

from __future__ import annotations

from typing import Any

import pytest

from fleetstart.controller.cli.rollout import describe_traffic, is_serving, version_or_alias
from fleetstart.controller.schemas.functions import Share, Traffic
from fleetstart.runtime.contract.errors import ErrorInfo, OutOfMemory, Unavailable
from fleetstart.runtime.contract.ids import FunctionName, Version


def traffic(**fields: Any) -> Traffic:
    return Traffic(**{"name": FunctionName("f"), "live": Version(1), "aliases": {}, "split": [], "past": [], **fields})


def test_it_waits_while_the_version_is_tried_and_ends_when_it_has_calls() -> None:
    assert not is_serving(traffic(trying=2), Version(2))
    assert is_serving(traffic(live=2), Version(2))
    assert is_serving(traffic(aliases={"prod": 2}), Version(2))
    assert is_serving(traffic(split=[Share(version=1, percent=90), Share(version=2, percent=10)]), Version(2))


def test_a_rejection_keeps_its_code_and_says_who_serves() -> None:
    error = ErrorInfo(code="out_of_memory", message="16 MiB were not enough", hint="raise memory")
    with pytest.raises(OutOfMemory) as rejected:
        is_serving(traffic(rejected=2, error=error), Version(2))
    assert rejected.value.message == "f@2 gets no calls: 16 MiB were not enough"
    assert rejected.value.hint == "f@1 keeps serving; raise memory"


def test_a_version_that_another_deploy_replaced_is_told_of() -> None:
    with pytest.raises(Unavailable, match="another change moved the calls"):
        is_serving(traffic(trying=3), Version(2))


def test_versions_are_named_by_number_or_alias() -> None:
    assert [version_or_alias(text) for text in ("3", "v3", "prod", "v", "vital", "²", "9" * 12)] == [
        3, 3, "prod", "v", "vital", "²", "9" * 12
    ]  # fmt: skip


def test_where_calls_go_is_said_in_a_sentence() -> None:
    split = [Share(version=1, percent=90), Share(version=2, percent=10)]
    assert describe_traffic(traffic()) == "f: calls go to version 1"
    assert describe_traffic(traffic(split=split, aliases={"prod": 1}, trying=3)) == (
        "f: calls go 90% to version 1 and 10% to version 2; prod is 1; version 3 is being tried"
    )
