"""An adapter in a spec: only on top of weights, and another version with another one."""

from __future__ import annotations

from typing import Any

import pytest

from fleetstart.runtime.contract.errors import InvalidSpec
from fleetstart.runtime.contract.function.spec import FunctionSpec, spec_digest
from fleetstart.runtime.contract.ids import BundleId, CheckpointId, FunctionName

BASE, LORA = CheckpointId("a" * 64), CheckpointId("b" * 64)


def spec(**fields: Any) -> FunctionSpec:
    return FunctionSpec(name=FunctionName("f"), bundle=BundleId("0" * 64), entry="handler:f", **fields)


def test_an_adapter_makes_another_version() -> None:
    digests = {spec_digest(spec(weights=BASE, adapter=adapter)) for adapter in (None, LORA, CheckpointId("c" * 64))}
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("fields", "says"),
    [({"adapter": LORA}, "needs the weights that it adapts"), ({"weights": BASE, "adapter": BASE}, "one and the same")],
)
def test_an_adapter_that_cannot_be_applied_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidSpec, match=says):
        spec(**fields)
