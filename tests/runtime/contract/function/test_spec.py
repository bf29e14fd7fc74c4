"""Specs: sizes as people write them, limits, and one canonical form."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract.errors import InvalidSpec
from fleetstart.runtime.contract.function.spec import SLO, FunctionSpec, LLMSettings, Scale, spec_bytes, spec_digest
from fleetstart.runtime.contract.ids import BundleId, FunctionName


def spec(**changes: Any) -> FunctionSpec:
    return FunctionSpec(
        **{"name": FunctionName("hello"), "bundle": BundleId("0" * 64), "entry": "handler:hello", **changes}
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": "Hello"}, "not allowed"),
        ({"name": "-a"}, "not allowed"),
        ({"name": "a" * 64}, "not allowed"),
        ({"name": "../x"}, "not allowed"),
        ({"entry": "handler"}, "module:attribute"),
        ({"entry": "handler:a.b"}, "module:attribute"),
        ({"entry": "../x:y"}, "module:attribute"),
        ({"memory_bytes": 1}, "memory"),
        ({"concurrency": 0}, "concurrency"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"llm": LLMSettings()}, "needs weights"),
        ({"layered": True}, "needs weights"),
        ({"layered": True, "weights": "1" * 64, "slo": SLO(tpot_s=0.1)}, "no LLM"),
    ],
)
def test_a_spec_that_cannot_work_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidSpec, match=says):
        spec(**changes)


@pytest.mark.parametrize("scale", [{"min": -1}, {"min": 5, "max": 4}, {"max": 0}, {"keep_alive_s": -1}])
def test_a_scale_that_cannot_work_is_refused(scale: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec, match="scale"):
        Scale(**scale)


@pytest.mark.parametrize("slo", [{}, {"ttft_s": 0}, {"tpot_s": -1}, {"ttft_s": 100_000}, {"ttft_s": float("nan")}])
def test_an_slo_that_promises_nothing_is_refused(slo: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec, match="slo"):
        SLO(**slo)


def test_an_slo_survives_the_wire_and_old_specs_have_none() -> None:
    promised = spec(slo=SLO(ttft_s=2))
    assert msgspec.json.decode(spec_bytes(promised), type=FunctionSpec) == promised
    old = spec_bytes(spec()).replace(b'"slo":null,', b"")
    assert b"slo" not in old
    assert msgspec.json.decode(old, type=FunctionSpec).slo is None


def test_unknown_fields_of_a_newer_client_are_refused_not_ignored() -> None:
    data = spec_bytes(spec()).replace(b'{"', b'{"gpu":1,"', 1)
    with pytest.raises(msgspec.ValidationError, match="gpu"):
        msgspec.json.decode(data, type=FunctionSpec)


def test_a_spec_too_large_for_one_message_is_refused() -> None:
    with pytest.raises(InvalidSpec, match="65536 at most"):
        spec_bytes(spec(env={"A": "x" * 70_000}))


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=5)))
def test_the_digest_depends_on_values_and_not_on_their_order(env: dict[str, str]) -> None:
    backwards = dict(reversed(env.items()))
    assert spec_digest(spec(env=env)) == spec_digest(spec(env=backwards))
    assert msgspec.json.decode(spec_bytes(spec(env=env)), type=FunctionSpec) == spec(env=env)
