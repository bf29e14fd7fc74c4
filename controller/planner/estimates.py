"""Estimates of nodes and versions from their history, and their updates from observations.

Two kinds of record, one a node and one a version, so that each lies in Redis by itself and learning of one start
rewrites two small values. Pure: estimates and an observation in, estimates out.

Departure from the paper: HydraServe takes library loading (t_l) as one constant of the cluster. Ours is the
version's, because a handler without imports and one with three frameworks share nodes and differ a hundredfold.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

import msgspec

from fleetstart.runtime.contract.process.moving_average import MovingAverage
from fleetstart.runtime.contract.timeline import Timeline

from .error_margins import PRIOR_MARGINS, Kind, Margins, pooled_margins, with_ratio

Source = Literal["store", "disk", "peer"]
LEAST_FETCH_BYTES = 16 * 1024 * 1024
"""Minimum size of a fetch that counts: a smaller one measures round trips, not bandwidth."""
REST_SHARE_MAX = 0.25
"""Maximum of `rest_s` as a share of the observed TTFT: a stalled store is not a property of the version."""


class NodeMeasures(msgspec.Struct, frozen=True, kw_only=True):
    """Estimates of one node. The priors are a modest server's: a start planned on them is rather too wide than too
    slow."""

    start_s: MovingAverage = MovingAverage(0.05)
    """t_cc: order seen until our code runs in the worker's process."""
    device_s: MovingAverage = MovingAverage(0.2)
    """t_cu: the device's context; next to nothing where the CPU is the device."""
    store_bytes_per_s: MovingAverage = MovingAverage(125e6)
    """b, all fetches of the node together: 1 Gbit/s."""
    disk_bytes_per_s: MovingAverage = MovingAverage(1e9)
    peer_bytes_per_s: MovingAverage = MovingAverage(125e6)
    """All fetches of the node from other nodes together; not used before it was measured."""
    device_bytes_per_s: MovingAverage = MovingAverage(10e9)
    """p: host memory to device, PCIe's share of it."""


CALIBRATING = 3
"""Starts whose predictions are not judged: the first comes from priors, and the next two correct it."""


class VersionMeasures(msgspec.Struct, frozen=True, kw_only=True):
    """Estimates of one version, as a whole worker on a device of its own."""

    library_s: MovingAverage = MovingAverage(0.3)
    """t_l: imports, and building the model around its weights."""
    prefill_s: MovingAverage = MovingAverage(0.2)
    """t_p: from request to first token, of the prompts that it gets."""
    decode_s: MovingAverage = MovingAverage(0.03)
    """t_d: each token after it."""
    hop_s: MovingAverage = MovingAverage(0.002)
    """t_n: hidden states from one stage to the next."""
    rest_s: MovingAverage = MovingAverage(0.01)
    """The part of a start that no formula names: propagation of orders and statuses, the last chunk's binding, the
    gateway."""
    device_bytes_per_s: MovingAverage = MovingAverage(0.0)
    """Compute speed of the devices on which `prefill_s` and `decode_s` were measured; on others these take as much
    longer as those are slower. 0: not known."""
    call_s: MovingAverage = MovingAverage(1.0)
    """Time that a call keeps its slot on a worker."""
    ttft_error: MovingAverage = MovingAverage(0.0)
    """Mean error of TTFT predictions: |observed - predicted| / observed. Until there are CALIBRATING starts, the last
    one's alone: what was predicted from priors says nothing of later predictions."""
    device_short_bytes: int = 0
    """Memory on a worker's devices together that was too little for it; 0: none was."""
    ttft_ratios: dict[Kind, list[float]] = {}
    """Observed over predicted TTFT of the last starts, for the margins."""


MEMORY_BYTES_PER_S = 50e9
"""Where it is not known: between a CPU's and a GPU's memory."""


def version_prior(weight_bytes: int, memory_bytes_per_s: float = MEMORY_BYTES_PER_S) -> VersionMeasures:
    """Estimates before the first call. A token reads every weight once."""
    decode_s = max(0.002, weight_bytes / max(1.0, memory_bytes_per_s))
    return VersionMeasures(
        decode_s=MovingAverage(decode_s),
        prefill_s=MovingAverage(0.05 + 5 * decode_s),
        device_bytes_per_s=MovingAverage(weight_bytes / decode_s),
    )


SLOWNESS_MAX = 1000.0
"""Largest ratio of two devices' compute speeds that is believed: a phone's core against a data centre's GPU."""


def slowness(version: VersionMeasures, device_bytes_per_s: float) -> float:
    """Factor of the version's times on devices of that compute speed; 1 where either is not known."""
    measured = version.device_bytes_per_s.value
    if not measured or not device_bytes_per_s:
        return 1.0
    return min(SLOWNESS_MAX, max(1 / SLOWNESS_MAX, measured / device_bytes_per_s))


NO_SPEEDS: Mapping[str, float] = MappingProxyType({})


class FleetMeasures(NamedTuple):
    """Estimates over all versions, for those with few observations: hops and margins depend more on the cluster."""

    margins: Margins = PRIOR_MARGINS
    hop_s: MovingAverage | None = None
    rest_s: MovingAverage | None = None
    speeds: Mapping[str, float] = NO_SPEEDS
    """Compute speed of devices by type."""


def fleet_measures(versions: Collection[VersionMeasures], speeds: Mapping[str, float] = NO_SPEEDS) -> FleetMeasures:
    """`speeds`: compute speed of devices by type."""
    hops_s = sorted(known.hop_s.value for known in versions if known.hop_s.count)
    rests_s = sorted(known.rest_s.value for known in versions if known.rest_s.count)
    return FleetMeasures(
        margins=pooled_margins(known.ttft_ratios for known in versions),
        hop_s=MovingAverage(hops_s[len(hops_s) // 2]) if hops_s else None,
        rest_s=MovingAverage(rests_s[len(rests_s) // 2]) if rests_s else None,
        speeds=speeds,
    )


def with_fleet_measures(version: VersionMeasures, others: FleetMeasures) -> VersionMeasures:
    """A version's estimates, with those over all versions in place of priors."""
    hop_s = version.hop_s if version.hop_s.count else others.hop_s or version.hop_s
    rest_s = version.rest_s if version.rest_s.count else others.rest_s or version.rest_s
    return msgspec.structs.replace(version, hop_s=hop_s, rest_s=rest_s)


def node_prior(known: list[NodeMeasures]) -> NodeMeasures:
    """Estimates of a node without starts: the median of the other nodes, by measure."""
    fields: dict[str, MovingAverage] = {}
    for name in NodeMeasures.__struct_fields__:
        values = sorted(getattr(measures, name).value for measures in known if getattr(measures, name).count)
        if values:
            fields[name] = MovingAverage(values[len(values) // 2])
    return NodeMeasures(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartObservation:
    """The measured parts of one start; None for a part that was not measured."""

    start_s: float | None = None
    device_s: float | None = None
    library_s: float | None = None
    fetch_s: float | None = None
    fetch_bytes: int = 0
    source: Source = "store"
    sharers: float = 1.0
    """Concurrent fetches on that node's link, this one included."""


def start_observation(
    timeline: Timeline,
    *,
    warm: bool,
    fetch_bytes: int = 0,
    source: Source = "store",
    sharers: float = 1.0,
) -> StartObservation:
    """Reads a start from a worker's timeline. `load` measures building only if no weights were awaited (`warm`)."""
    names = {phase.name for phase in timeline.phases}

    def seconds(name: Literal["start", "device", "import", "load", "fetch"]) -> float | None:
        return timeline.total_ms(name) / 1000 if name in names else None

    load_s = seconds("load")
    library_s = (seconds("import") or 0.0) + load_s if warm and load_s is not None else None
    return StartObservation(
        start_s=seconds("start"),
        device_s=seconds("device"),
        library_s=library_s,
        fetch_s=None if warm else seconds("fetch"),
        fetch_bytes=fetch_bytes,
        source=source,
        sharers=sharers,
    )


def observe_start_on_node(node: NodeMeasures, seen: StartObservation) -> NodeMeasures:
    rates = {"store": node.store_bytes_per_s, "disk": node.disk_bytes_per_s, "peer": node.peer_bytes_per_s}
    if seen.fetch_s and seen.fetch_bytes >= LEAST_FETCH_BYTES:
        rates[seen.source] = rates[seen.source].fold(seen.fetch_bytes / seen.fetch_s * max(1.0, seen.sharers))
    return msgspec.structs.replace(
        node,
        start_s=_folded(node.start_s, seen.start_s),
        device_s=_folded(node.device_s, seen.device_s),
        store_bytes_per_s=rates["store"],
        disk_bytes_per_s=rates["disk"],
        peer_bytes_per_s=rates["peer"],
    )


def observe_start_of_version(version: VersionMeasures, seen: StartObservation) -> VersionMeasures:
    return msgspec.structs.replace(version, library_s=_folded(version.library_s, seen.library_s))


def observe_device_shortage(version: VersionMeasures, size_bytes: int) -> VersionMeasures:
    """Learns that a worker with so much device memory had too little: the next one gets more."""
    return msgspec.structs.replace(version, device_short_bytes=max(version.device_short_bytes, size_bytes))


def observe_generation(
    version: VersionMeasures,
    *,
    prefill_s: float,
    decode_s: float | None,
    call_s: float,
    stages: int = 1,
    work: float = 1.0,
    device_bytes_per_s: float = 0.0,
) -> VersionMeasures:
    """Learns from one call on a ready worker. `decode_s` is None for an answer of one token; `work` as in
    `latency_model`; `device_bytes_per_s`: compute speed of its devices, 0 if it is not known.

    A pipeline's call says what a hop takes, if whole workers' calls have told what the model takes; before, it is a
    better guess at that than the prior.
    """
    known = msgspec.structs.replace(version, call_s=version.call_s.fold(call_s))
    if stages == 1:
        # Times on other devices are brought to those of the mean, or a few calls on slow ones would count for all.
        speed = known.device_bytes_per_s.fold(device_bytes_per_s) if device_bytes_per_s else MovingAverage(0.0)
        then = msgspec.structs.replace(known, device_bytes_per_s=speed)
        here, before = slowness(then, device_bytes_per_s), slowness(known, speed.value)
        return msgspec.structs.replace(
            then,
            prefill_s=_scaled(known.prefill_s, before).fold(prefill_s / here),
            decode_s=_folded(_scaled(known.decode_s, before), decode_s / here if decode_s is not None else None),
        )
    if decode_s is None:
        return known
    if not known.decode_s.count:
        model_s = decode_s - stages * known.hop_s.value
        return msgspec.structs.replace(known, decode_s=MovingAverage(max(known.decode_s.value, model_s / work)))
    hop_s = max(0.0, (decode_s - known.decode_s.value * work) / stages)
    return msgspec.structs.replace(known, hop_s=known.hop_s.fold(hop_s))


def _with_error(known: MovingAverage, error: float) -> MovingAverage:
    if known.count < CALIBRATING:
        return MovingAverage(error, known.count + 1)
    return known.fold(error)


def is_calibrated(version: VersionMeasures) -> bool:
    """True if its predictions come from starts of its own, and not from priors."""
    return version.ttft_error.count >= CALIBRATING


def observe_outcome(
    version: VersionMeasures,
    *,
    kind: Kind,
    predicted_s: float,
    observed_s: float,
    hindsight_s: float | None,
    shared: bool = False,
) -> VersionMeasures:
    """Learns from the outcome of a TTFT prediction: its error is a metric, its ratio makes margins, its bias is
    `rest_s`.

    `hindsight_s` is the prediction with the start's own parts as they turned out to be: a link that was slower than
    was known is no bias. None if that is not known; then it is not learned. `shared`: later starts were let onto its
    link, as its promise allowed; what that cost it is no error, or margins would feed on themselves.
    """
    allowed_s = max(0.0, hindsight_s - predicted_s) if shared and hindsight_s is not None else 0.0
    known = msgspec.structs.replace(
        version,
        ttft_error=_with_error(version.ttft_error, relative_error(predicted_s, observed_s)),
        ttft_ratios=with_ratio(version.ttft_ratios, kind, (observed_s - allowed_s) / max(predicted_s, 1e-9)),
    )
    if hindsight_s is None:
        return known
    rest_s = version.rest_s.value + observed_s - hindsight_s
    rest_s = min(max(0.0, rest_s), REST_SHARE_MAX * observed_s)
    return msgspec.structs.replace(known, rest_s=version.rest_s.fold(rest_s))


def relative_error(predicted: float, observed: float) -> float:
    return abs(observed - predicted) / max(observed, 1e-9)


def _scaled(estimate: MovingAverage, factor: float) -> MovingAverage:
    return MovingAverage(estimate.value * factor, estimate.count)


def _folded(estimate: MovingAverage, sample: float | None) -> MovingAverage:
    return estimate if sample is None else estimate.fold(sample)
