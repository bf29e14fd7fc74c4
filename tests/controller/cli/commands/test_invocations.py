"""Invocations that are redriven or cancelled together, some of which are no longer there."""

from __future__ import annotations

import pytest

from fleetstart.controller.cli.commands.invocations import cancelled_of, redriven_of
from fleetstart.controller.schemas.invocations import InvocationInfo
from fleetstart.controller.state.invocation_records import Status
from fleetstart.runtime.contract.errors import FleetError, InvalidInput, NotFound, Unauthorized
from fleetstart.runtime.contract.ids import FunctionName, InvocationId


def info(name: str, status: Status) -> InvocationInfo:
    return InvocationInfo(
        id=InvocationId(name), function=FunctionName("f"), status=status, origin="async", method="POST",
        target="/fn/f", url="", result_url="", events_url="", accepted_unix_ms=0, queue_until_unix_ms=0,
    )  # fmt: skip


def test_dead_letters_that_another_one_redrives_meanwhile_keep_the_rest_from_nothing() -> None:
    faults: dict[str, FleetError] = {"b": InvalidInput("b is running"), "d": NotFound("d is not stored")}

    def queue_again(name: str) -> InvocationInfo:
        if name in faults:
            raise faults[name]
        return info(name, "queued")

    redriven, refusals = redriven_of(list("abcde"), queue_again)
    assert [info.id for info in redriven] == ["a", "c", "e"]
    assert refusals == ["b is running", "d is not stored"]
    faults["c"] = Unauthorized("no key")
    with pytest.raises(Unauthorized):
        redriven_of(list("abcde"), queue_again)


def test_all_that_wait_are_cancelled_also_those_that_the_first_list_has_no_room_for() -> None:
    waits = {name: True for name in "abcdefg"}

    def cancel_one(name: str) -> InvocationInfo:
        if name == "c":
            raise NotFound("c is not stored")
        waits[name] = False
        return info(name, "succeeded" if name == "e" else "cancelled")

    cancelled = cancelled_of(lambda: [name for name, still in waits.items() if still][:3], cancel_one)
    assert [one.id for one in cancelled] == ["a", "b", "d", "f", "g"]
