"""Placement constraints: what a function requires of a node beside memory, and the error if none fits.

A node reports its region, or none, its isolations, its pools and its GPUs. A function that names regions runs in these
alone, each stage of a pipeline too; one that names none runs anywhere. One that needs torch runs where torch is. A
model whose KV cache is larger than its memory runs where that lies in device memory: on nodes with a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

from fleetstart.runtime.contract.function.spec import MEMORY_MIN_BYTES, FunctionSpec, Isolation
from fleetstart.runtime.contract.node.devices import DeviceReport
from fleetstart.runtime.contract.node.reports import ISOLATION_ADVICE, Confinement
from fleetstart.runtime.contract.sizes import MIB

from .devices import DeviceNeed, could_hold, inventory, wanted_in_words

_SANDBOX_ADVICE = {
    "gvisor": "install gVisor there (Debian: apt install runsc)",
    "container": "start a container engine there, name its socket (FS_CONTAINER_ENGINE=unix:///var/run/docker.sock)",
}
"""How a node comes to have an isolation."""


class PlacementConstraints(NamedTuple):
    """A function's requirements on its nodes."""

    regions: tuple[str, ...] = ()
    isolation: Isolation = "namespaces"
    pool: str = ""
    """The pool of its workers; empty: any node has it."""
    gpu: bool = False
    runs: str = ""
    """Python and platform that its packages were built for; empty: it has none."""
    listed: bool = False
    """It has a list of what it may reach, which binds a worker with a network of its own alone."""
    devices: DeviceNeed | None = None
    """The devices of each worker; None: the host alone."""


class NodeTraits(Protocol):
    """The properties of a node that constraints are about."""

    @property
    def region(self) -> str:
        """The node's region; empty if it has none."""

    @property
    def isolations(self) -> Collection[str]:
        """Supported isolations beyond namespaces."""

    @property
    def confines(self) -> Confinement:
        """What it runs workers without gVisor in."""

    @property
    def isolation_refused(self) -> str:
        """The call that its kernel refused, if it has no namespaces."""

    @property
    def pools(self) -> Collection[str]:
        """Pools of workers that it can start; empty if it does not say."""

    @property
    def gpus(self) -> int:
        """Number of its GPUs."""

    @property
    def devices(self) -> Sequence[DeviceReport]:
        """Its devices."""

    @property
    def runs(self) -> str:
        """Its Python and platform, as `packages_for` names them; empty if it does not say."""


NO_CONSTRAINTS = PlacementConstraints()


def constraints_of(spec: FunctionSpec, packages_for: str = "", short_bytes: int = 0) -> PlacementConstraints:
    """`packages_for`: Python and platform of its packages (`contract.function.layer`); `short_bytes`: as for
    `device_need`."""
    return PlacementConstraints(
        tuple(spec.region), spec.isolation, spec.pool, needs_gpu(spec), packages_for, bool(spec.egress),
        device_need(spec, short_bytes),
    )  # fmt: skip


def device_need(spec: FunctionSpec, short_bytes: int = 0) -> DeviceNeed | None:
    """Devices that a worker needs. `short_bytes`: device memory that was found to be too little."""
    return None if spec.gpu is None else DeviceNeed(spec.gpu, needs_gpu(spec), short_bytes)


def needs_gpu(spec: FunctionSpec) -> bool:
    """True if the KV cache does not fit into the worker's memory, in which it lies without a GPU."""
    return spec.llm is not None and spec.llm.kv_memory_bytes > spec.memory_bytes - MEMORY_MIN_BYTES


def admits(wanted: PlacementConstraints, node: NodeTraits) -> bool:
    regions, _, pool, gpu, runs, _, devices = wanted
    return (
        (not pool or not node.pools or pool in node.pools)
        and (not regions or node.region in regions)
        and _isolates(wanted, node)
        and (not gpu or node.gpus > 0)
        and (not runs or not node.runs or node.runs == runs)
        and (devices is None or could_hold(devices, node.devices))
    )


def _isolates(wanted: PlacementConstraints, node: NodeTraits) -> bool:
    """True if a node confines its workers as it asks. In a plain process, a list could not be enforced."""
    if wanted.isolation != "namespaces":
        return wanted.isolation in node.isolations
    return node.confines == "namespaces" or (node.confines == "plain" and not wanted.listed)


def unmet_constraint(wanted: PlacementConstraints, nodes: Iterable[NodeTraits]) -> tuple[str, str]:
    """The reason why no node satisfies the constraints, and a hint; empty if one does, or if there is no node."""
    known = list(nodes)
    if not known or any(admits(wanted, node) for node in known):
        return "", ""
    regions, isolation, pool, gpu, runs, listed, devices = wanted
    in_region = [node for node in known if not regions or node.region in regions]
    if not in_region:
        return (
            f"it may run in {_either(regions)}, and no node is there: {region_counts(node.region for node in known)}",
            "start a node there (`fs up --region`, or FS_REGION), or deploy with another `region`",
        )
    place = f" in {_either(regions)}" if regions else ""
    count = f"none of {len(in_region)} nodes{place} has" if len(in_region) > 1 else f"the node{place} has not"
    isolated = [node for node in in_region if _isolates(wanted, node)]
    if not isolated and isolation == "namespaces":
        needs = "its list of what it may reach needs" if listed else "its workers need"
        refused = next((node.isolation_refused for node in in_region if node.isolation_refused), "")
        return f"{needs} namespaces, which {count}{f': {refused}' if refused else ''}", ISOLATION_ADVICE
    if not isolated:
        return (
            f"it asks for isolation {isolation}, which {count}",
            f"{_SANDBOX_ADVICE[isolation]} and restart the node, whose log has the reason; "
            "or deploy without `isolation`",
        )
    with_pool = [node for node in isolated if not pool or not node.pools or pool in node.pools]
    if not with_pool:
        return (
            f"its workers need {pool.partition('+')[0]}, which {count}",
            "install it there (pip install 'fleetstart[model]' brings torch) and restart the node, or add one with it",
        )
    if not any(not runs or not node.runs or node.runs == runs for node in with_pool):
        have = " and ".join(sorted({node.runs for node in with_pool}))
        return (
            f"its packages were built for {runs}, and nodes{place} run {have}",
            "deploy it from an environment with the Python and the platform of the nodes",
        )
    if devices is not None and not any(could_hold(devices, node.devices) for node in with_pool):
        have = "; ".join(sorted({inventory(node.devices) for node in with_pool}))
        return (
            f"{wanted_in_words(devices)}, and nodes{place} have {have}",
            "ask for devices that nodes have (`fs nodes` lists them), or add a node with such devices",
        )
    if not gpu:
        return f"none of {len(with_pool)} nodes{place} has all that it needs", "`fs nodes` shows what each has"
    return (
        f"its kv_memory does not fit into its memory, so it needs a GPU, which {count}",
        "raise `memory` above `kv_memory`, or lower `kv_memory`; with a GPU the cache is in device memory",
    )


def too_large(memory_bytes: int, largest_bytes: int | None) -> str:
    """The reason why not even an empty node could hold a worker; empty if one could, or if there is no node."""
    if largest_bytes is None or memory_bytes <= largest_bytes:
        return ""
    return f"a worker needs {memory_bytes // MIB} MiB, and the largest node has {largest_bytes // MIB} MiB"


def region_counts(regions: Iterable[str]) -> str:
    """Counts regions in words: "2 nodes are in us, 1 in no region"."""
    counts = sorted(Counter(regions).items(), key=lambda pair: (not pair[0], -pair[1], pair[0]))
    parts = [f"{count} in {region or 'no region'}" for region, count in counts]
    first = counts[0][1]
    parts[0] = parts[0].replace(" in ", " node is in " if first == 1 else " nodes are in ", 1)
    return ", ".join(parts)


def _either(names: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
