"""What the controller alone keeps in Redis: functions, versions, failed starts, first answers."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from fleetstart.runtime.contract.errors import ErrorInfo
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import LIVE, FunctionName, Version, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder, WorkerStatus
from fleetstart.runtime.contract.weights.stage import LayerLayout


class VersionKey(NamedTuple):
    """Names a version; `str()` is the key of `GatewayReport.loads`."""

    name: FunctionName
    version: Version

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"


def parse_version_key(text: str) -> VersionKey | None:
    name, _, version = text.rpartition("@")
    return VersionKey(FunctionName(name), Version(int(version))) if name and version.isdecimal() else None


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """A version that is tried before calls go to it, and what becomes of it then."""

    version: Version
    alias: str = LIVE
    """That points at it afterwards."""
    percent: int = 100
    """Of the calls of `live` that it gets; less than all is a canary."""
    begun_unix_ms: int


class Rejection(msgspec.Struct, frozen=True, kw_only=True):
    """A version that was tried and did not get any calls."""

    version: Version
    error: ErrorInfo
    unix_ms: int


class ScaleOverride(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `fs scale` has set over what the versions say; None leaves a version's own."""

    min: int | None = None
    max: int | None = None
    keep_alive_s: float | None = None
    rate: float | None = None
    burst: int | None = None
    concurrent: int | None = None


class FunctionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Which versions a function's calls go to. `versions` decides how it changes."""

    name: FunctionName
    live: Version
    deployed_unix_ms: int
    aliases: dict[str, Version] = {}
    """Besides `live`."""
    split: dict[Version, int] = {}
    """Percent of the calls that name no version; empty: all go to `live`."""
    past: list[Version] = []
    """Versions that were live, the last one last: where `fs rollback` goes."""
    rollout: Rollout | None = None
    rejected: Rejection | None = None
    """The last one, until the next deploy."""
    scaled: ScaleOverride | None = None


class VersionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Immutable once written; numbers are never used again, also after the function was deleted."""

    version: Version
    digest: str
    spec: FunctionSpec
    segment_bytes: int
    """What the checkpoint takes of a node's memory; 0 without weights."""
    created_unix_ms: int
    layout: LayerLayout | None = None
    """What its stages would weigh; None if our engine does not run it, or it was deployed before there were stages."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Starts of one version that failed one after the other."""

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
    """Whether it only works for another worker. One that has grown works for callers."""
    return order.stage is not None and order.stage.index > 0 and not (status is not None and status.whole)
