"""A function that is ready to be deployed, and the line that is printed when it was."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.weights.engine_choice import EngineChoice

from ...schemas.functions import Deployed
from .. import output
from ..packages.publish import PublishedLayer
from ..weights.publish import Published


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFunction:
    """A function that is ready to be deployed."""

    spec: FunctionSpec
    checkpoints: Mapping[str, Published]
    """The weights and their adapters, if it has them, with what they are called."""
    layer: PublishedLayer | None = None
    """The packages that it requires."""
    engine: EngineChoice | None = None
    """The engine of a language model."""


def summary_of(deployed: Deployed, packed: PackedFunction, took_s: float) -> str:
    text = (
        f"{deployed.name}@{deployed.version} {'deployed' if deployed.created else 'is live already'} in {took_s:.1f} s"
    )
    text += _doubt(deployed)
    if packed.engine is not None:
        text += f"; engine {packed.engine.engine} ({packed.engine.reason})"
    if packed.layer is not None:
        uploaded = packed.layer.uploaded_bytes
        state = f"{output.format_size(uploaded)} sent" if uploaded else "in the store already"
        built = packed.layer.layer
        text += f"; {len(built.packages) or 'locked'} packages, {output.format_size(built.size_bytes)}, {state}"
    for what, one in packed.checkpoints.items():
        sent = f"{output.format_size(one.uploaded_bytes)} sent" if one.uploaded_bytes else "in the store already"
        text += f"; {what} {output.format_size(one.weight_bytes)}, {sent}"
    return text


def _doubt(deployed: Deployed) -> str:
    """Doubts about a version that was there already and was not tried now; "" if it has started before."""
    if deployed.created or deployed.trying:
        return ""
    if (failed := deployed.last_failure) is not None:
        age = output.format_age(max(0.0, time.time() - failed.unix_ms / 1000))
        return f"; its last start failed {age} ago: {failed.error.message}"
    return "" if deployed.started else "; it has never started"
