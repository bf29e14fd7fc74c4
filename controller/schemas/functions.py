"""Structs of the management API: functions, versions, checkpoints, usage, invoices, budgets, the system's status."""

from __future__ import annotations

from typing import Literal

import msgspec

from fleetstart.runtime.contract.billing.ledger import LedgerRow
from fleetstart.runtime.contract.errors import ErrorInfo
from fleetstart.runtime.contract.function.spec import FunctionSpec, Limits, Scale
from fleetstart.runtime.contract.ids import CheckpointId, FunctionName, NodeId, Version, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerState, WorkerStatus
from fleetstart.runtime.contract.node.reports import NodeReport

from ..state.records import ScaleOverride
from .nodes import CopyInfo, NodeCertificate


class FailedStart(msgspec.Struct, frozen=True, kw_only=True):
    """A start of a version that failed."""

    unix_ms: int
    error: ErrorInfo


class Deployed(msgspec.Struct, frozen=True, kw_only=True):
    name: FunctionName
    version: Version
    url: str
    created: bool
    """False if a version in service already has this spec."""
    trying: bool = False
    """True if a rollout began: the version gets calls once it is ready. `traffic` has the outcome."""
    started: bool = False
    """True if a worker of it has ever been ready."""
    last_failure: FailedStart | None = None
    """The last failed start of a version that was in service already, if none has succeeded since."""
    warning: str = ""
    """Why no node could run it at present; empty if one could."""


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Accuracy of the predictions of TTFT."""

    error: float
    """|observed - predicted| / observed, as a running mean."""
    starts: int
    """Starts that were compared."""
    calibrated: bool = False
    """True if there were enough of them. Until then the error is that of guesses."""


class FunctionInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: FunctionName
    version: Version
    """The live one."""
    url: str
    spec: FunctionSpec
    deployed_unix_ms: int
    workers: list[WorkerStatus]
    queued: int
    running: int
    async_calls: int = 0
    """Async calls that wait or run; of those that wait, `queued` has only the few that gateways have taken up."""
    broken: ErrorInfo | None = None
    """Why its starts are given up for now, if they are."""
    last_failure: FailedStart | None = None
    """The last failed start of the live version, until one succeeds."""
    prediction: Prediction | None = None
    """Accuracy of predictions for its starts so far."""
    scale: Scale = Scale()
    """Effective scale: that of its live version, overridden by `fs scale`."""
    limits: Limits = Limits()
    """Effective limits."""


class WorkerSummary(msgspec.Struct, frozen=True, kw_only=True):
    worker: WorkerId
    node: NodeId
    function: FunctionName
    version: Version
    state: WorkerState
    start: str


class FunctionSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a list shows of a function: a twentieth of the bytes of a FunctionInfo. What is empty is left out."""

    name: FunctionName
    version: Version
    project: str = ""
    tags: dict[str, str] = {}
    weights: CheckpointId | None = None
    adapter: CheckpointId | None = None
    workers: list[WorkerSummary] = []
    queued: int = 0
    running: int = 0
    broken: bool = False
    """True if its starts are given up for now."""
    last_failure: bool = False
    """True if the last start of the live version failed."""


class VersionInfo(msgspec.Struct, frozen=True, kw_only=True):
    version: Version
    roles: list[str]
    """`live`, its share of a split, aliases, `being tried`, `rejected`; none for one that only its number reaches."""
    workers: int
    deployed_unix_ms: int
    spec: FunctionSpec
    error: str = ""
    """Error of its last starts, if they failed."""


class VersionRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int | str
    """A number or an alias."""


class Share(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int | str
    """A number or an alias; answers have numbers."""
    percent: int


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Routing of a function's calls to its versions."""

    name: FunctionName
    live: Version
    aliases: dict[str, Version]
    split: list[Share]
    """Shares of the calls that name no version; empty: all go to `live`."""
    past: list[Version]
    """Versions that were live, the last one last."""
    trying: Version | None = None
    """The version being rolled out: it gets calls once one of its workers is ready."""
    rejected: Version | None = None
    """The version of the last deploy, if its rollout was rejected."""
    error: ErrorInfo | None = None
    """Why it was rejected."""
    scaled: ScaleOverride | None = None
    """Override set by `fs scale`."""


class CheckpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    id: CheckpointId
    complete: bool
    """True if it can be deployed."""
    problem: str
    """Why it is incomplete; empty if it is complete."""
    weight_bytes: int
    object_bytes: int
    """Its size in the store."""
    tensors: int
    files: int
    parts: int
    adapter: bool
    """True if it is a LoRA adapter."""
    protected: bool = False
    """True if digests protect it against forgery: checkpoints of earlier releases have checksums alone."""
    created_unix_ms: int
    used_by: list[str]
    """Versions of deployed functions, as name@version."""
    in_memory: list[str] = []
    """Nodes that have all of it in memory."""
    copies: list[str] = []
    """Nodes that keep a copy in memory because a function asks for one (`keep`), also those that still fetch it."""


class UploadInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An open upload of a checkpoint."""

    id: str
    """{project}:{checkpoint}: a project has one of each checkpoint."""
    checkpoint: CheckpointId
    project: str
    key: str
    """Name of the API key that began it."""
    objects: int
    """How many it has announced, the manifest among them."""
    object_bytes: int
    stored: int
    """How many of them are in the store."""
    stored_bytes: int
    begun_unix_ms: int
    ends_unix_ms: int
    """When it ends if nothing more comes."""


class UnreadableInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A record in Redis that this controller's release cannot read, and skips."""

    kind: str
    """What it should be: "function", "version", "node", "order", "budget"."""
    name: str
    error: str


class RedisMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of Redis."""

    used_bytes: int
    limit_bytes: int
    """Its `maxmemory`; without one, half of its machine's memory."""
    families: dict[str, int] = {}
    """Bytes by family of keys, as counted last; empty after a start."""


class SystemStatus(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    url: str
    gateway: str
    leader: str
    redis: str
    """"ok", or the error; for limited keys "unavailable"."""
    redis_problems: list[str] = []
    """What is wrong with its settings or nearly full, each with what to do; empty for limited keys."""
    redis_memory: RedisMemory | None = None
    """None for limited keys, and until it was read."""
    store: str
    """Its URL; empty for limited keys."""
    store_problem: str = ""
    """Why the store cannot be used, if it was tried (`probe=1`); empty: it can, or was not tried."""
    nodes: list[NodeReport]
    draining: list[str] = []
    """Names of the nodes that get no workers (`fs node drain`)."""
    copies: list[CopyInfo] = []
    """Copies of checkpoints that nodes keep in memory because functions ask for them (`keep`)."""
    certificates: list[NodeCertificate] = []
    """Certificates of the nodes that have joined (`fs node join`), also of those that are not alive."""
    functions: list[FunctionInfo]
    """With `functions=summary` a FunctionSummary of each."""
    budgets: list[BudgetInfo] = []
    access: Literal["keys", "open"] = "keys"
    """"keys": every request needs a key; "open": this machine needs none (`fs up --open`)."""
    unreadable: list[UnreadableInfo] = []
    """Records that are skipped, the first hundred: another release wrote them, or they are broken."""
    limited: bool = False
    """True if the caller's key is limited: the status then has its functions only, no nodes, and no errors of Redis or
    the store."""


class NodesStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a SystemStatus with `functions=summary` has of the nodes."""

    nodes: list[NodeReport]
    draining: list[str] = []
    copies: list[CopyInfo] = []
    certificates: list[NodeCertificate] = []
    functions: list[FunctionSummary]
    limited: bool = False


class UsageLine(msgspec.Struct, frozen=True, kw_only=True):
    """Sum of the ledger's rows of one group. Fields that usage is not grouped by are empty, or 0."""

    function: FunctionName
    version: Version
    kind: str
    """"invocation", or the worker phase."""
    key: str = ""
    """Name of the API key."""
    project: str = ""
    caller: str = ""
    """The function that made the calls; empty for clients' calls."""
    parent: str = ""
    """The call for which they were made."""
    tag: str = ""
    """Value of the one tag, or all tags as "name=value,name=value"."""
    day: str = ""
    """2026-11-22, UTC: when the row was booked."""
    rows: int
    duration_ms: int
    """Billed milliseconds of invocations, length of phases."""
    waived_ms: int = 0
    """Milliseconds that are not charged: starts, fetches, idle time without `min`."""
    device_gib_ms: int = 0
    """The same time, times the device memory that workers had: GiB-milliseconds."""
    cost_nusd: int
    cpu_ms: int | None = None
    """Processor time that workers used, for information; null where none was measured, as in the fields below."""
    memory_peak_bytes: int | None = None
    """The most memory that one worker had."""
    received_bytes: int | None = None
    """Bytes from the hosts that functions list in `network`."""
    sent_bytes: int | None = None
    """Bytes to them."""
    device_peak_bytes: int | None = None
    """The most memory of GPUs that one worker was seen with."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    since_unix_ms: int
    until_unix_ms: int
    by: list[str] = []
    lines: list[UsageLine]
    total_nusd: int


class InvoiceLine(msgspec.Struct, frozen=True, kw_only=True):
    function: FunctionName
    version: Version
    kind: str
    """"invocation", or the worker phase."""
    price: int
    """Version of the price sheet."""
    rate_nusd_per_gib_s: int
    """0: waived."""
    device_type: str = ""
    device_rate_nusd_per_gib_s: int = 0
    device_gib_ms: int = 0
    """Device memory times time."""
    rows: int
    duration_ms: int
    cost_nusd: int
    """The sum of the rows' costs, each of which was rounded to a nano-dollar."""


class Invoice(msgspec.Struct, frozen=True, kw_only=True):
    month: str
    complete: bool
    """True if the month is over and the invoice final: rows count to the month in which they were booked."""
    lines: list[InvoiceLine]
    rows: int
    total_nusd: int
    segments: int
    """Number of the ledger's segments that were published when it was made."""
    checksum: str
    """Checksum of the last of them. Each segment names the checksum of the one before."""


class LedgerLine(msgspec.Struct, frozen=True, kw_only=True):
    entry: str
    """Unix ms at which it was booked, and its number within that millisecond."""
    row: LedgerRow


class NewPrices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    from_unix_ms: int | None = None
    """None: as soon as possible, a minute ahead."""
    execute_nusd_per_gib_s: int
    idle_nusd_per_gib_s: int
    device_nusd_per_gib_s: dict[str, int] = {}
    """Rates of device memory by type; types that it does not name keep theirs."""


class BudgetTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    limit_nusd: int
    per: Literal["day", "month"]
    """Calendar period, UTC."""
    alert_percent: int = 80


class BudgetInfo(msgspec.Struct, frozen=True, kw_only=True):
    function: FunctionName
    limit_nusd: int
    per: Literal["day", "month"]
    alert_percent: int
    spent_nusd: int
    stage: Literal["ok", "alert", "spent"]
    period: str
    """2026-11-22 or 2026-11."""
    renews_unix_ms: int
