"""Records that only the controller writes to Redis: functions, versions, failed starts, first answers, measures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from fleetstart.runtime.contract.errors import ErrorInfo
from fleetstart.runtime.contract.function.names import project_of
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import LIVE, FunctionName, NodeId, Version, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder, WorkerStatus
from fleetstart.runtime.contract.record_decoder import RecordDecoder, UnreadableRecord
from fleetstart.runtime.contract.weights.stage import LayerLayout

from ..planner.estimates import NodeMeasures, VersionMeasures


class VersionKey(NamedTuple):
    """The name of a version; `str()` is the key of `GatewayReport.loads`."""

    name: FunctionName
    version: Version

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"


def parse_version_key(text: str) -> VersionKey | None:
    name, _, version = text.rpartition("@")
    return VersionKey(FunctionName(name), Version(int(version))) if name and version.isdecimal() else None


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout: a version that is probed before it gets calls, and its traffic afterwards."""

    version: Version
    alias: str = LIVE
    """Alias that points at the version afterwards."""
    percent: int = 100
    """Percent of the calls of `live` that it gets; less than all is a canary."""
    begun_unix_ms: int


class Rejection(msgspec.Struct, frozen=True, kw_only=True):
    """A failed rollout: the version was probed and gets no calls."""

    version: Version
    error: ErrorInfo
    unix_ms: int


class ScaleOverride(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `fs scale` that override those of the versions; None keeps a version's own."""

    min: int | None = None
    max: int | None = None
    keep_alive_s: float | None = None
    rate: float | None = None
    burst: int | None = None
    concurrent: int | None = None


class FunctionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A function and its traffic: the versions that its calls go to. `traffic` computes its changes."""

    name: FunctionName
    live: Version
    first: Version = Version(1)
    """Its first version. Lower numbers were of an earlier function of that name, which was removed."""
    deployed_unix_ms: int
    aliases: dict[str, Version] = {}
    """Aliases besides `live`."""
    split: dict[Version, int] = {}
    """Percent by version of the calls that name none; empty: all go to `live`."""
    past: list[Version] = []
    """Versions that were live, the last one last: where `fs rollback` goes."""
    rollout: Rollout | None = None
    rejected: Rejection | None = None
    """The last failed rollout, until the next deploy; that of the live version, until one of its workers starts."""
    started: Version | None = None
    """The live version, once one of its workers has been ready."""
    scaled: ScaleOverride | None = None


class VersionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Immutable once written; numbers are never used again, also after the function was deleted.

    Its function's name and project agree: what is said of a project (access, secrets, quotas, bills) holds by either.
    """

    version: Version
    digest: str
    spec: FunctionSpec
    segment_bytes: int
    """Memory that the checkpoint takes on a node; 0 without weights."""
    created_unix_ms: int
    layout: LayerLayout | None = None
    """Sizes of its layers; None if it cannot be cut into stages, or was deployed before there were stages."""
    chunks: int = 0
    """Number of its checkpoint's chunks; 0 without weights, or if an earlier release deployed it."""
    packages_bytes: int = 0
    """Size of its packages on a node's disk."""
    packages_for: str = ""
    """Python and platform that they were built for."""

    def __post_init__(self) -> None:
        if project_of(self.spec.name) != self.spec.home:
            raise ValueError(
                f"function {self.spec.name} is in project {self.spec.home} by its setting, and in "
                f"{project_of(self.spec.name)} by its name: deploy it again, as {self.spec.home}.{self.spec.name}"
            )


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive failed starts of one version."""

    count: int
    last_unix_ms: int
    error: ErrorInfo


class StartOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The first answer of a worker, to a call that had waited for its start."""

    worker: WorkerId
    function: FunctionName
    version: Version
    first_byte_unix_ms: int


def is_helper(order: WorkerOrder, status: WorkerStatus | None) -> bool:
    """Checks whether a worker is a helper stage of another one. A consolidated one is not."""
    return order.stage is not None and order.stage.index > 0 and not (status is not None and status.whole)


_NODE, _VERSION = RecordDecoder(NodeMeasures), RecordDecoder(VersionMeasures)


def read_measures(
    raw: Mapping[bytes, bytes],
) -> tuple[dict[NodeId, NodeMeasures], dict[VersionKey, VersionMeasures]]:
    """Decodes fs:measures. Entries that cannot be decoded are left out, and learned again."""
    nodes: dict[NodeId, NodeMeasures] = {}
    versions: dict[VersionKey, VersionMeasures] = {}
    for field, value in raw.items():
        node, version = measured(field)
        try:
            if node is not None:
                nodes[node] = _NODE.decode(value)
            elif version is not None:
                versions[version] = _VERSION.decode(value)
        except UnreadableRecord:
            continue
    return nodes, versions


def measured(field: bytes) -> tuple[NodeId | None, VersionKey | None]:
    """The node or the version that a field of fs:measures is of."""
    kind, _, name = field.decode(errors="replace").partition(":")
    if kind == "node":
        return NodeId(name), None
    return None, parse_version_key(name) if kind == "version" else None
