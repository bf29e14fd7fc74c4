"""Names, contents and writers of all keys in Redis. Nothing of the data path is stored there.

{name} and {function} are full names (`function.names`).

| key | type | holds | written by |
| --- | --- | --- | --- |
| fs:functions | hash | name → FunctionRecord (JSON) | controller |
| fs:functions:last | hash | name → last version number given, also of functions that were removed | controller |
| fs:versions:{name} | hash | version → VersionRecord (JSON) | controller |
| fs:nodes | hash | node → 1, every node ever seen and not removed | node |
| fs:nodes:draining | hash | node → unix ms since which it gets no workers | controller, `fs node join` |
| fs:nodes:identities | hash | node → NodeIdentity: the key that the system vouches for | controller |
| fs:authority | hash | current → AuthorityRecord: certificate authority of nodes, its key encrypted | controller |
| fs:node:{node} | string, expiring | NodeReport: the node's lease | node |
| fs:desired:{node} | hash | worker → WorkerOrder | scheduler; a shell's: the controller that serves it |
| fs:observed:{node} | hash | worker → WorkerStatus | node |
| fs:copies:{node} | hash | checkpoint → CopyOrder | scheduler |
| fs:peer_key:{node} | string | SealedPeerKey: what the node's grants are signed with, sealed for it | scheduler |
| fs:peer_keys | hash | node → PeerKeyRecord: the same, encrypted, for controllers | scheduler |
| fs:gateway:{gateway} | string, expiring | GatewayReport: the gateway's lease | gateway |
| fs:leader | string, expiring | gateway id that schedules | scheduler |
| fs:fence | string | fencing token, one more at each change of scheduler | scheduler |
| fs:failures:{name}:{version} | hash | consecutive failed starts: count, last_unix_ms, error | scheduler |
| fs:failing | set | keys of the fs:failures that there may be: which of all versions to read | scheduler |
| fs:open | hash | invocation → OpenInvocation: accepted, not yet in the ledger | gateway |
| fs:ledger | stream | rows that are in no segment yet: field `row` is an InvocationRow or PhaseRow | gateway, node |
| fs:ledger:ids | sorted set | row id → unix ms: makes writes idempotent; old ones are removed | gateway, node |
| fs:ledger:horizon | string | unix ms: of rows that began earlier, ids may be in segments only | scheduler |
| fs:ledger:late | stream | rows from before the horizon, not looked up in the segments yet | gateway, node |
| fs:ledger:segments | hash | number → header of the segment in the object store; as many as there are | scheduler |
| fs:ledger:spent | hash | {day since 1970, UTC}:{function} → nano-dollars booked on that day | gateway, node |
| fs:durable:{writer} | string, expiring | written so that WAITAOF confirms earlier writes | gateway, node |
| fs:prices | hash | version → PriceSheet | controller |
| fs:kept | hash | worker → 1: kept because of `min`, so its idle time is billed | scheduler |
| fs:budgets | hash | function → Budget | controller |
| fs:alerts | stream, capped | BudgetEvent: each threshold of each period once | scheduler |
| fs:alerted:{what} | string, expiring | 1: that event is in fs:alerts | scheduler |
| fs:removals | hash | checkpoint or bundle → "removing:{unix ms}:{token}" or "removed:{unix ms}:{token}" | controller |
| fs:memory | string, expiring | family of keys → bytes, as counted last | scheduler |
| fs:trace:{invocation} | string, expiring | InvocationTrace | gateway |
| fs:plan:{worker} | string, expiring | Plan: why it was started there; one for a whole pipeline | scheduler |
| fs:measures | hash | node:{node} → NodeMeasures, version:{name}@{version} → VersionMeasures | scheduler |
| fs:learned:{worker}:{what} | string, expiring | 1: its start, or its outcome, is in the measures | scheduler |
| fs:outcomes | list, capped | StartOutcome: a first answer that the calibrator has not read yet | gateway, scheduler |
| fs:logs:{function} | stream, capped | LogLine | node |
| fs:log_bytes:{project} | hash | function → bytes of its log | node |
| fs:history:{resolution}:{function}:{number} | hash, expiring | {cell}:{gateway} → CallCounts (msgpack) | gateway |
| fs:history:failures | stream, capped | SystemEvent: the first failed start in a row, and the last | scheduler |
| fs:invocation:{invocation} | hash | `call`: Envelope, `state`: Progress; outlives its connection | gateway |
| fs:invocations:due:{function} | sorted set | invocation → unix ms at which its next run is due | gateway |
| fs:invocations:timers | sorted set | invocation → unix ms: when it expires, or its webhook is due | gateway |
| fs:invocations:functions | set | functions that have any of these | gateway |
| fs:invocations:index | sorted set | invocation → unix ms of its acceptance | gateway |
| fs:invocations:kept | sorted set | invocation → unix ms until which it is kept | gateway |
| fs:invocations:adopted | string | run id of the Redis that was compared with the object store | scheduler |
| fs:invocation:events:{invocation} | stream, capped | events of its answer, ids claim-number: field `e` | gateway |
| fs:idempotency:{digest} | string, expiring | Claim: who runs the call with that key, or its answer | gateway |
| fs:idempotency:bytes:{hour} | string, expiring | bytes of answers put into Redis in that hour | gateway |
| fs:idempotency:place:{digest} | string, expiring | CallPlace: which worker runs the call with that key | gateway |
| fs:idempotency:kept | sorted set | object of an answer → unix ms until which it is kept | gateway |
| fs:webhooks:secrets | hash | project → secret that its webhooks are signed with | controller |
| fs:schedules | hash | function → ScheduleMark: up to when its schedule was looked at | scheduler |
| fs:keys | hash | name → KeyRecord: hashes of API keys, the revoked ones too | controller |
| fs:keys:used | hash | name → unix ms at which it was last good for something, some seconds late | gateway |
| fs:projects | hash | name → ProjectRecord: its quotas | controller |
| fs:secrets | hash | {project}/{name} → SecretRecord: encrypted | controller |
| fs:stored | hash | object of the store → its bytes and the project that it is counted to | controller |
| fs:stored:sums | hash | {project}:bytes and {project}:objects → their sums | controller |
| fs:uploads | hash | {project}:{checkpoint} → UploadRecord: the parts that an upload announced | controller |
| fs:uploads:ends | sorted set | {project}:{checkpoint} → unix ms at which the upload ends by itself | controller |
| fs:layers:unused | hash | layer → unix ms since which no version needs it | controller |
| fs:volumes | hash | full name → VolumeRecord: its versions | controller, node |
| fs:volumes:unused | hash | object of a volume in the store → unix ms since which no version needs it | controller |
| fs:audit | stream | AuditEvent, in the field `event`; the oldest go to the object store | controller |

Channels: fs:events:desired:{node} carries WorkerOrder, fs:events:copies:{node} CopyOrder, fs:events:observed
WorkerStatus, fs:events:gateways GatewayReport, fs:events:functions a function's name, fs:events:invocations "STATUS
INVOCATION".
"""

from __future__ import annotations

from typing import Literal

from .ids import FunctionName, InvocationId, NodeId, Version, WorkerId

SCHEMA = "fs:schema"
FUNCTIONS = "fs:functions"
FUNCTIONS_LAST = "fs:functions:last"
NODES = "fs:nodes"
NODES_DRAINING = "fs:nodes:draining"
NODES_IDENTITIES = "fs:nodes:identities"
AUTHORITY = "fs:authority"
PEER_KEYS = "fs:peer_keys"
LEADER = "fs:leader"
FENCE = "fs:fence"
FAILING = "fs:failing"
OPEN = "fs:open"
LEDGER = "fs:ledger"
LEDGER_IDS = "fs:ledger:ids"
LEDGER_HORIZON = "fs:ledger:horizon"
LEDGER_LATE = "fs:ledger:late"
LEDGER_SEGMENTS = "fs:ledger:segments"
LEDGER_SPENT = "fs:ledger:spent"
PRICES = "fs:prices"
KEPT = "fs:kept"
BUDGETS = "fs:budgets"
ALERTS = "fs:alerts"
REMOVALS = "fs:removals"
LOGS = "fs:logs:"
STORED = "fs:stored"
STORED_SUMS = "fs:stored:sums"
UPLOADS = "fs:uploads"
UPLOADS_ENDS = "fs:uploads:ends"
LAYERS_UNUSED = "fs:layers:unused"
MEASURES = "fs:measures"
OUTCOMES = "fs:outcomes"
KEYS = "fs:keys"
KEYS_USED = "fs:keys:used"
PROJECTS = "fs:projects"
SECRETS = "fs:secrets"
VOLUMES = "fs:volumes"
VOLUMES_UNUSED = "fs:volumes:unused"
AUDIT = "fs:audit"
MEMORY = "fs:memory"
HISTORY_FAILURES = "fs:history:failures"

EVENTS_OBSERVED = "fs:events:observed"
EVENTS_GATEWAYS = "fs:events:gateways"
EVENTS_FUNCTIONS = "fs:events:functions"
EVENTS_INVOCATIONS = "fs:events:invocations"

INVOCATIONS_FUNCTIONS = "fs:invocations:functions"
INVOCATIONS_TIMERS = "fs:invocations:timers"
INVOCATIONS_INDEX = "fs:invocations:index"
INVOCATIONS_KEPT = "fs:invocations:kept"
INVOCATIONS_ADOPTED = "fs:invocations:adopted"
IDEMPOTENCY_KEPT = "fs:idempotency:kept"
WEBHOOK_SECRETS = "fs:webhooks:secrets"
SCHEDULES = "fs:schedules"

GATEWAY_PREFIX = "fs:gateway:"


def versions(name: FunctionName) -> str:
    return f"fs:versions:{name}"


def node(node: NodeId) -> str:
    return f"fs:node:{node}"


def desired(node: NodeId) -> str:
    return f"fs:desired:{node}"


def observed(node: NodeId) -> str:
    return f"fs:observed:{node}"


def events_desired(node: NodeId) -> str:
    return f"fs:events:desired:{node}"


def copies(node: NodeId) -> str:
    return f"fs:copies:{node}"


def events_copies(node: NodeId) -> str:
    return f"fs:events:copies:{node}"


def peer_key(node: NodeId) -> str:
    return f"fs:peer_key:{node}"


def gateway(gateway: str) -> str:
    return GATEWAY_PREFIX + gateway


def failures(name: FunctionName, version: Version) -> str:
    return f"fs:failures:{name}:{version}"


def failures_of(key: str) -> tuple[FunctionName, Version] | None:
    """The version whose failed starts a key holds; None if it is no such key."""
    name, _, version = key.removeprefix("fs:failures:").rpartition(":")
    return (FunctionName(name), Version(int(version))) if name and version.isdecimal() else None


def alerted(what: str) -> str:
    return f"fs:alerted:{what}"


def durable(writer: str) -> str:
    return f"fs:durable:{writer}"


def trace(invocation: InvocationId) -> str:
    return f"fs:trace:{invocation}"


def plan(worker: WorkerId) -> str:
    return f"fs:plan:{worker}"


def measures_of_node(node: NodeId) -> str:
    """A field of MEASURES."""
    return f"node:{node}"


def measures_of_version(name: FunctionName, version: Version) -> str:
    """A field of MEASURES."""
    return f"version:{name}@{version}"


def learned(worker: WorkerId, what: Literal["start", "outcome"]) -> str:
    return f"fs:learned:{worker}:{what}"


def logs(name: FunctionName) -> str:
    return f"{LOGS}{name}"


def log_bytes(project: str) -> str:
    """Bytes of the logs of each function of a project."""
    return f"fs:log_bytes:{project}"


def history(resolution: str, function: str, number: int) -> str:
    """`number`: hours since 1970 for minutes, days for hours."""
    return f"fs:history:{resolution}:{function}:{number}"


def invocation(invocation: InvocationId) -> str:
    return f"fs:invocation:{invocation}"


def invocation_events(invocation: InvocationId) -> str:
    return f"fs:invocation:events:{invocation}"


def invocations_due(name: FunctionName) -> str:
    return f"fs:invocations:due:{name}"


def idempotency(digest: str) -> str:
    return f"fs:idempotency:{digest}"


def idempotency_bytes(hour: int) -> str:
    """`hour`: since 1970."""
    return f"fs:idempotency:bytes:{hour}"


def call_place(digest: str) -> str:
    return f"fs:idempotency:place:{digest}"
