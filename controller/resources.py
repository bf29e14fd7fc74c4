"""The resources of the management API under /api/v1, as the CLI and any other client see them.

| call | body | answer |
| --- | --- | --- |
| GET /healthz | | {"ok": true}; never wakes, never bills |
| GET /api/v1/status | | SystemStatus |
| HEAD /api/v1/objects/{key} | | 200 with Content-Length, or 404: what a deploy need not upload again |
| PUT /api/v1/objects/{key} | the bytes, streamed | 201; `bundles/{sha256}` and `checkpoints/{id}/{object}` only; a bundle's and a manifest's digest must match its key |
| GET /api/v1/objects/{key} | | the bytes, streamed; 206 for one Range, 416 for one that cannot be had |
| GET /api/v1/checkpoints?unfinished=0 | | [CheckpointInfo], newest first; with unfinished, also uploads without a manifest |
| GET /api/v1/checkpoints/{id} | | its manifest: the very bytes whose sha256 is the id |
| DELETE /api/v1/checkpoints/{id} | | CheckpointInfo as it was; 400 while a version of a deployed function uses it |
| POST /api/v1/functions | FunctionSpec | Deployed; 400 if bundle or checkpoint is not whole in the store |
| GET /api/v1/functions | | [FunctionInfo] |
| GET /api/v1/functions/{name} | | FunctionInfo |
| DELETE /api/v1/functions/{name} | | FunctionInfo as it was; its workers are drained |
| GET /api/v1/functions/{name}/logs?tail=100&follow=0 | | LogLine a line (NDJSON); with follow, until the client leaves |
| GET /api/v1/invocations?function=&limit=20 | | [InvocationRow], newest first |
| GET /api/v1/invocations/{id} | | InvocationTrace |
| GET /api/v1/invocations/{id}/plan | | InvocationPlan (`explain`): why its worker was started so, and what came of it |
| GET /api/v1/usage?function=&since_unix_ms= | | Usage |
| GET /openapi.json | | description of the above |

Errors are ErrorBody with the status of the error's class.
"""  # noqa: E501

from __future__ import annotations

import msgspec

from fleetstart.runtime.contract.errors import ErrorInfo
from fleetstart.runtime.contract.function import FunctionSpec
from fleetstart.runtime.contract.ids import CheckpointId, FunctionName, Version
from fleetstart.runtime.contract.messages import NodeReport, WorkerStatus


class Deployed(msgspec.Struct, frozen=True, kw_only=True):
    name: FunctionName
    version: Version
    url: str
    created: bool
    """False if the very same spec was the live version already."""


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """How far the predictions of TTFT were off."""

    error: float
    """|observed - predicted| / observed, as a running mean."""
    starts: int
    """That were compared."""


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
    broken: ErrorInfo | None = None
    """Why its starts are given up for now, if they are."""
    prediction: Prediction | None = None
    """Of its starts so far."""


class CheckpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    id: CheckpointId
    complete: bool
    """Whether it can be deployed."""
    problem: str
    """What it lacks; empty if it is complete."""
    weight_bytes: int
    object_bytes: int
    """What it takes in the store."""
    tensors: int
    files: int
    parts: int
    adapter: bool
    """Whether it is a LoRA adapter, to be used on top of other weights."""
    created_unix_ms: int
    used_by: list[str]
    """Versions of deployed functions, as name@version."""


class SystemStatus(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    url: str
    gateway: str
    leader: str
    redis: str
    """"ok", or what is wrong."""
    store: str
    nodes: list[NodeReport]
    functions: list[FunctionInfo]


class UsageLine(msgspec.Struct, frozen=True, kw_only=True):
    """Sum of the ledger's rows for one function and version and kind of row."""

    function: FunctionName
    version: Version
    kind: str
    """"invocation", or the worker phase."""
    rows: int
    duration_ms: int
    """Billed milliseconds of invocations, length of phases."""
    cost_nusd: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    since_unix_ms: int
    until_unix_ms: int
    lines: list[UsageLine]
    total_nusd: int
