"""Structs that settings of a handler file are built with, such as `Scale(max=8)`, with checks of their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fleetstart.runtime.contract.errors import InvalidSpec
from fleetstart.runtime.contract.function.spec import SLO, Limits, Scale


def _scale(**arguments: Any) -> Scale:
    unknown = set(arguments) - {"min", "max", "keep_alive_s", "standby_s"}
    if unknown:
        raise InvalidSpec(
            f"Scale() has no setting {sorted(unknown)[0]!r}", hint="it has min, max, keep_alive_s and standby_s"
        )
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, int | float if name.endswith("_s") else int):
            raise InvalidSpec(f"Scale({name}=...) must be a number, got {value!r}")
    return Scale(**arguments)


def _slo(**arguments: Any) -> SLO:
    unknown = set(arguments) - {"ttft_s", "tpot_s"}
    if unknown:
        raise InvalidSpec(f"SLO() has no setting {sorted(unknown)[0]!r}", hint="it has ttft_s and tpot_s")
    for name, value in arguments.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise InvalidSpec(f"SLO({name}=...) must be a number of seconds, got {value!r}")
    return SLO(**arguments)


def _limits(**arguments: Any) -> Limits:
    unknown = set(arguments) - {"rate", "burst", "concurrent"}
    if unknown:
        raise InvalidSpec(f"Limits() has no setting {sorted(unknown)[0]!r}", hint="it has rate, burst and concurrent")
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, int | float if name == "rate" else int):
            raise InvalidSpec(f"Limits({name}=...) must be a number, got {value!r}")
    return Limits(**arguments)


VALUES: dict[str, Callable[..., Any]] = {"Scale": _scale, "SLO": _slo, "Limits": _limits}
