"""An adapter in a spec: only on top of weights, and another version with another one."""

from __future__ import annotations

from typing import Any

import pytest

from fleetstart.runtime.contract.errors import InvalidSpec
from fleetstart.runtime.contract.function.spec import FunctionSpec, LLMSettings, spec_digest
from fleetstart.runtime.contract.ids import BundleId, CheckpointId, FunctionName
from fleetstart.runtime.contract.node.devices import DeviceRequest

LLM = LLMSettings()
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


# ── named adapters ─────────────────────────────────────────────────────────────────────────────────


def test_a_worker_attaches_the_weights_and_then_the_adapters_by_name() -> None:
    other = CheckpointId("c" * 64)
    found = spec(weights=BASE, llm=LLM, adapters={"sql": LORA, "legal": other})
    assert found.checkpoints == [BASE, other, LORA]
    assert spec_digest(found) == spec_digest(spec(weights=BASE, llm=LLM, adapters={"legal": other, "sql": LORA}))
    assert spec(weights=BASE, adapter=LORA).checkpoints == [BASE, LORA]
    assert spec().checkpoints == []


def test_a_model_with_named_adapters_is_not_cut_into_stages() -> None:
    assert spec(weights=BASE, llm=LLM).in_layers
    assert not spec(weights=BASE, llm=LLM, adapters={"sql": LORA}).in_layers


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"llm": None}, "this is no LLM"),
        ({"adapter": CheckpointId("c" * 64)}, "applied to every request"),
        ({"adapters": {"f": LORA}}, "cannot be named 'f'"),
        ({"adapters": {"a/b": LORA}}, "cannot be named 'a/b'"),
        ({"adapters": {"": LORA}}, "cannot be named ''"),
        ({"adapters": {"sql": BASE}}, "weights and adapter sql are one checkpoint"),
        ({"adapters": {"sql": LORA, "legal": LORA}}, "adapter sql and adapter legal are one checkpoint"),
        ({"adapters": {f"a{n}": CheckpointId(f"{n:064x}") for n in range(17)}}, "16 at most, got 17"),
        (
            {"llm": LLMSettings(tensor_parallel_size=2), "gpu": DeviceRequest(count=2)},
            "split over devices has no named adapters",
        ),
    ],
)
def test_named_adapters_that_cannot_be_chosen_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidSpec, match=says):
        spec(**({"weights": BASE, "llm": LLM, "adapters": {"sql": LORA}} | fields))
