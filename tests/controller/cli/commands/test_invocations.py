"""Dead letters that are redriven together, some of which are no longer there."""

from __future__ import annotations

import pytest

from fleetstart.controller.cli.commands.invocations import redriven_of
from fleetstart.controller.schemas.invocations import InvocationInfo
from fleetstart.runtime.contract.errors import FleetError, InvalidInput, NotFound, Unauthorized
from fleetstart.runtime.contract.ids import FunctionName, InvocationId


def test_dead_letters_that_another_one_redrives_meanwhile_keep_the_rest_from_nothing() -> None:
    faults: dict[str, FleetError] = {"b": InvalidInput("b is running"), "d": NotFound("d is not stored")}

    def queue_again(name: str) -> InvocationInfo:
        if name in faults:
            raise faults[name]
        return InvocationInfo(
            id=InvocationId(name), function=FunctionName("f"), status="queued", origin="async", method="POST",
            target="/fn/f", url="", result_url="", events_url="", accepted_unix_ms=0, queue_until_unix_ms=0,
        )  # fmt: skip

    redriven, refusals = redriven_of(list("abcde"), queue_again)
    assert [info.id for info in redriven] == ["a", "c", "e"]
    assert refusals == ["b is running", "d is not stored"]
    faults["c"] = Unauthorized("no key")
    with pytest.raises(Unauthorized):
        redriven_of(list("abcde"), queue_again)
