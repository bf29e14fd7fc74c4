"""Result of `fs deploy --dry-run` for one function, and its text."""

from __future__ import annotations

import msgspec

from fleetstart.runtime.contract.billing.ledger import PRICE_NUSD_PER_GIB_S, cost_nusd, dollars
from fleetstart.runtime.contract.ids import FunctionName

from ...planner.accuracy_report import format_explanation
from ...schemas.planning import Forecast
from .. import output


class DryRun(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and forecast of one function that a deploy would send."""

    name: FunctionName
    bundle_bytes: int
    new_bundle_bytes: int
    """Bytes of the bundle that the store lacks: all or none."""
    weight_bytes: int
    new_weight_bytes: int
    """Bytes of weights that would be sent; 0 if the store has them."""
    layer_bytes: int = 0
    """Bytes of the packages that it requires."""
    new_layer_bytes: int = 0
    memory_bytes: int
    forecast: Forecast


def render_dry_run(one: DryRun) -> str:
    forecast = one.forecast
    lines = [f"{one.name}: {_version(forecast)}; nothing was sent or changed"]
    lines.append(f"bundle   {_sent(one.bundle_bytes, one.new_bundle_bytes)}")
    if one.weight_bytes:
        lines.append(f"weights  {_sent(one.weight_bytes, one.new_weight_bytes)}")
    if one.layer_bytes:
        lines.append(f"packages {_sent(one.layer_bytes, one.new_layer_bytes)}")
    second = dollars(cost_nusd(1000, one.memory_bytes, PRICE_NUSD_PER_GIB_S))
    lines.append(f"cost     ${second} a second of a call, at the list price; its start is waived")
    basis = "from the measured starts of its live version"
    if not forecast.learned:
        basis = "not calibrated yet, as no start of it was measured"
    lines.append(f"predicted cold start, {basis}:\n")
    return "\n".join(lines) + "\n" + format_explanation(forecast.explanation)


def _version(forecast: Forecast) -> str:
    if forecast.live is None:
        return "would be version 1, or the next one if it existed before"
    return (
        f"would be a new version after {forecast.live}" if forecast.changes else f"is live as version {forecast.live}"
    )


def _sent(size_bytes: int, new_bytes: int) -> str:
    if not new_bytes:
        return f"{output.format_size(size_bytes)}, in the store already"
    return f"{output.format_size(size_bytes)}, {output.format_size(new_bytes)} of it to send"
