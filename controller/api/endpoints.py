"""The table of all endpoints of the management API, by the class that serves them.

Made from it: starlette's routes (`routes_of`), the permissions that the auth middleware demands and the verbs of the
audit log (`route_rules`), the OpenAPI document (`openapi.document`), and the table in the documentation
(`markdown_table`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args, get_origin

import msgspec
from starlette.routing import BaseRoute

from fleetstart.runtime.contract.billing.ledger import InvocationRow, InvocationTrace, LogLine
from fleetstart.runtime.contract.billing.prices import PriceSheet
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import LIVE
from fleetstart.runtime.contract.node.shell import IDLE_S
from fleetstart.runtime.contract.weights.manifest import Manifest

from ..auth.route_rules import SOCKET, RouteRule
from ..history.service import EVENTS, RANGE, HistoryApi
from ..observability.activity import Activity
from ..schemas.access import (
    AuditEvent,
    KeyCreated,
    KeyInfo,
    NewKey,
    ProjectInfo,
    ProjectTerms,
    Rekeyed,
    Rotation,
    SecretInfo,
    SecretValue,
)
from ..schemas.functions import (
    BudgetInfo,
    BudgetTerms,
    CheckpointInfo,
    Deployed,
    FunctionInfo,
    Invoice,
    LedgerLine,
    NewPrices,
    Share,
    SystemStatus,
    Traffic,
    UploadInfo,
    Usage,
    VersionInfo,
    VersionRef,
)
from ..schemas.history import CallHistory, FunctionTotal, SystemEvent
from ..schemas.invocations import InvocationInfo, ReplayTerms, ScheduleInfo, WebhookRotation, WebhookSecret
from ..schemas.nodes import JoinTerms, NodeInfo, NodeJoin, Renewal, Renewed
from ..schemas.planning import Forecast, InvocationPlan, Proposal
from ..schemas.volumes import NewVolumeVersion, Pruned, PruneTerms, VolumeInfo
from ..shell.service import ShellService
from ..state.access_records import DEFAULT
from ..state.records import ScaleOverride
from .billing import BillingApi
from .functions import FunctionsApi
from .invocations import LIMIT as ASYNC_LIMIT
from .invocations import InvocationsApi
from .keys import KeysApi
from .metrics import ObservabilityApi
from .nodes import NodesApi
from .objects import BYTES, ObjectsApi
from .openapi.endpoint import Endpoint
from .projects import ProjectsApi
from .secrets import SecretsApi
from .system import AUDIT_ROWS, SystemApi
from .traces import LIMIT, TracesApi
from .versions import VersionsApi
from .volumes import VolumesApi

NDJSON = "application/x-ndjson"
OBJECT = "/api/v1/objects/{key:path}"
CHECKPOINT = "/api/v1/checkpoints/{id}"
UPLOADS = "/api/v1/uploads"
FUNCTION = "/api/v1/functions/{name}"
ALIAS = f"{FUNCTION}/aliases/{{alias}}"
INVOCATION = "/api/v1/invocations/{id}"
WEBHOOK_SECRET = "/api/v1/webhooks/secret"
BUDGET = "/api/v1/budgets/{function}"
NODE = "/api/v1/nodes/{name}"
PROJECT = "/api/v1/projects/{name}"
SECRET = "/api/v1/secrets/{project}/{name}"
VOLUME = "/api/v1/volumes/{name}"
SPAN: dict[str, str | int | type[int]] = {"since_unix_ms": 0, "until_unix_ms": int}

# fmt: off
ENDPOINTS: dict[type, tuple[Endpoint, ...]] = {
    SystemApi: (
        Endpoint("GET", "/healthz", "open", SystemApi.healthz, "Health of this process; starts and bills nothing",
                 answer=dict),
        Endpoint("GET", "/readyz", "open", SystemApi.readyz,
                 "Whether calls should come here: 503 with the reasons if not", answer=dict),
        Endpoint("GET", "/openapi.json", "key", SystemApi.openapi, "This API, as OpenAPI", answer=dict,
                 documented=False, before_sync=True),
        Endpoint("GET", "/api/v1/status", "read", SystemApi.status, "Status of the whole system; `probe` tries Redis, "
                 "`functions` is `full`, `summary` (a twentieth of the bytes) or `none`",
                 query={"probe": 0, "functions": "full"}, answer=SystemStatus, before_sync=True),
        Endpoint("GET", "/api/v1/audit", "admin", SystemApi.audit, "The audit log, newest first", unlimited=True,
                 query={"by": "", "since_unix_ms": 0, "limit": AUDIT_ROWS}, answer=list[AuditEvent]),
    ),
    ObservabilityApi: (
        Endpoint("GET", "/metrics", "read", ObservabilityApi.metrics, "Metrics in Prometheus' text format", answer=str,
                 media="text/plain", documented=False),
        Endpoint("GET", "/", "open", ObservabilityApi.home, "Redirects to the dashboard", status=302, documented=False),
        Endpoint("GET", "/ui", "open", ObservabilityApi.home, "Redirects to the dashboard", status=302,
                 documented=False),
        Endpoint("GET", "/ui/{file:path}", "open", ObservabilityApi.file, "The dashboard's files, which hold no data",
                 answer=str, media="text/html", documented=False),
        Endpoint("GET", "/api/v1/activity", "read", ObservabilityApi.activity,
                 "Calls, latencies, starts and cost of the last minutes", answer=Activity),
    ),
    HistoryApi: (
        Endpoint("GET", "/api/v1/history", "read", HistoryApi.history,
                 "Calls, errors, latencies, starts and cost over 1h, 6h, 24h, 7d or 30d",
                 query={"function": "", "range": RANGE, "step": ""}, answer=CallHistory),
        Endpoint("GET", "/api/v1/history/functions", "read", HistoryApi.functions,
                 "The same of up to 24 h by function, those with the most failures first",
                 query={"since_unix_ms": int, "until_unix_ms": int}, answer=list[FunctionTotal]),
        Endpoint("GET", "/api/v1/events", "read", HistoryApi.events,
                 "Deploys, changes, failed starts and budget alerts, newest first",
                 query={"function": "", "since_unix_ms": int, "until_unix_ms": int, "limit": EVENTS},
                 answer=list[SystemEvent]),
    ),
    ObjectsApi: (
        Endpoint("HEAD", OBJECT, "read", ObjectsApi.head_object, "Size of an object; 404 if it is not stored",
                 kind="object"),
        Endpoint("GET", OBJECT, "read", ObjectsApi.get_object, "Download an object, or one range of it", kind="object",
                 headers=("range",), answer=bytes, media=BYTES),
        Endpoint("PUT", OBJECT, "deploy", ObjectsApi.put_object,
                 "Upload a bundle or a checkpoint's object, once; a digest in the key must match. 200 if an equal one "
                 "is there, 409 if another one is", kind="object", answer=dict, status=201),
        Endpoint("GET", "/api/v1/checkpoints", "read", ObjectsApi.list_checkpoints, "List checkpoints, newest first",
                 unlimited=True, query={"unfinished": 0}, answer=list[CheckpointInfo]),
        Endpoint("GET", CHECKPOINT, "read", ObjectsApi.get_manifest, "The manifest of a checkpoint", kind="checkpoint",
                 answer=Manifest),
        Endpoint("DELETE", CHECKPOINT, "deploy", ObjectsApi.delete_checkpoint,
                 "Remove a checkpoint, unless a deployed function uses it", audit="checkpoint.rm", kind="checkpoint",
                 unlimited=True, answer=CheckpointInfo),
        Endpoint("DELETE", f"{CHECKPOINT}/parts/{{object}}", "admin", ObjectsApi.delete_part,
                 "Remove a damaged part, so that a push of the same weights sends it again",
                 audit="checkpoint.part.rm", kind="checkpoint", unlimited=True, answer=dict),
        Endpoint("GET", UPLOADS, "read", ObjectsApi.list_uploads, "List open uploads of checkpoints, newest first",
                 answer=list[UploadInfo]),
        Endpoint("POST", UPLOADS, "deploy", ObjectsApi.begin_upload,
                 "Begin the upload of a checkpoint, or go on with it; the body is its manifest", audit="upload.begin",
                 kind="upload", answer=UploadInfo, status=201),
        Endpoint("DELETE", f"{UPLOADS}/{{id}}", "deploy", ObjectsApi.abort_upload,
                 "Abort an upload, and delete its parts unless something else names them", audit="upload.abort",
                 kind="upload", answer=UploadInfo),
    ),
    FunctionsApi: (
        Endpoint("GET", "/api/v1/functions", "read", FunctionsApi.functions, "List functions",
                 answer=list[FunctionInfo]),
        Endpoint("POST", "/api/v1/functions", "deploy", FunctionsApi.deploy, "Deploy a version",
                 audit="function.deploy", kind="function", query={"alias": LIVE, "percent": 100, "probe": 0},
                 body=FunctionSpec, answer=Deployed),
        Endpoint("POST", "/api/v1/forecast", "deploy", FunctionsApi.forecast,
                 "Forecast a deploy: placement, cold start, cost", body=Proposal, answer=Forecast),
        Endpoint("GET", FUNCTION, "read", FunctionsApi.function, "One function", kind="function", answer=FunctionInfo),
        Endpoint("DELETE", FUNCTION, "deploy", FunctionsApi.delete, "Delete a function and drain its workers",
                 audit="function.rm", kind="function", answer=FunctionInfo),
        Endpoint("GET", f"{FUNCTION}/logs", "read", FunctionsApi.logs, "Log of a function, a JSON object a line",
                 kind="function", query={"tail": 100, "follow": 0}, answer=LogLine, media=NDJSON),
        Endpoint("GET", f"{FUNCTION}/openapi.json", "key", FunctionsApi.interface,
                 "OpenAPI document of a function's calls", kind="function", query={"version": LIVE}, answer=dict),
    ),
    VersionsApi: (
        Endpoint("GET", f"{FUNCTION}/versions", "read", VersionsApi.versions,
                 "List a function's versions, newest first", kind="function", answer=list[VersionInfo]),
        Endpoint("GET", f"{FUNCTION}/traffic", "read", VersionsApi.traffic, "Traffic of a function's versions",
                 kind="function", answer=Traffic),
        Endpoint("PUT", ALIAS, "deploy", VersionsApi.set_alias, "Point an alias at a version", audit="function.alias",
                 kind="function", body=VersionRef, answer=Traffic),
        Endpoint("DELETE", ALIAS, "deploy", VersionsApi.delete_alias, "Remove an alias", audit="function.alias.rm",
                 kind="function", answer=Traffic),
        Endpoint("PUT", f"{FUNCTION}/split", "deploy", VersionsApi.split, "Split traffic; shares sum to 100",
                 audit="function.split", kind="function", body=list[Share], answer=Traffic),
        Endpoint("POST", f"{FUNCTION}/rollback", "deploy", VersionsApi.rollback,
                 "Roll back to a version, or undo the last change", audit="function.rollback", kind="function",
                 body=VersionRef | None, answer=Traffic),
        Endpoint("PUT", f"{FUNCTION}/scale", "deploy", VersionsApi.scale, "Override the scale until the next deploy",
                 audit="function.scale", kind="function", body=ScaleOverride | None, answer=Traffic),
    ),
    ShellService: (
        Endpoint(SOCKET, f"{FUNCTION}/shell", "deploy", ShellService.__call__, "A shell in the environment of a worker",
                 audit="function.shell", kind="function", query={"version": LIVE, "idle_s": int(IDLE_S)},
                 documented=False),
    ),
    TracesApi: (
        Endpoint("GET", "/api/v1/invocations", "read", TracesApi.invocations,
                 "List invocations, newest first; `failed`: only those with an error",
                 query={"function": "", "limit": LIMIT, "failed": 0, **SPAN}, answer=list[InvocationRow]),
        # A key that may call may also fetch the outcome; the handler checks that the function is one of the key's.
        Endpoint("GET", INVOCATION, "key", TracesApi.invocation, "An invocation and its timeline", kind="invocation",
                 answer=InvocationTrace | InvocationInfo),
        Endpoint("GET", f"{INVOCATION}/plan", "read", TracesApi.plan,
                 "Placement decision of its worker, beside what was observed", kind="invocation",
                 answer=InvocationPlan),
    ),
    InvocationsApi: (
        Endpoint("DELETE", INVOCATION, "invoke", InvocationsApi.cancel, "Cancel an invocation, also a running one",
                 audit="invocation.cancel", kind="invocation", answer=InvocationInfo),
        Endpoint("GET", "/api/v1/async", "read", InvocationsApi.kept, "List stored invocations, newest first",
                 query={"function": "", "status": "", "dead": 0, "limit": ASYNC_LIMIT}, answer=list[InvocationInfo]),
        Endpoint("POST", f"{INVOCATION}/cancel", "invoke", InvocationsApi.cancel, "Cancel an invocation",
                 audit="invocation.cancel", kind="invocation", answer=InvocationInfo),
        Endpoint("GET", f"{INVOCATION}/result", "invoke", InvocationsApi.result,
                 "Stored response; 202 before there is one", kind="invocation", answer=str, media="*/*"),
        Endpoint("GET", f"{INVOCATION}/events", "invoke", InvocationsApi.events, "Its events (SSE) after Last-Event-ID",
                 kind="invocation", answer=str, media="text/event-stream"),
        Endpoint("POST", f"{INVOCATION}/redrive", "invoke", InvocationsApi.redrive,
                 "Queue a failed, expired or cancelled invocation again", audit="invocation.redrive", kind="invocation",
                 answer=InvocationInfo),
        Endpoint("POST", f"{INVOCATION}/replay", "invoke", InvocationsApi.replay, "Repeat its request as a new one",
                 audit="invocation.replay", kind="invocation", body=ReplayTerms | None, answer=InvocationInfo,
                 status=202),
        Endpoint("POST", f"{INVOCATION}/redeliver", "invoke", InvocationsApi.redeliver, "Deliver its webhook again",
                 audit="invocation.redeliver", kind="invocation", answer=InvocationInfo),
        Endpoint("GET", WEBHOOK_SECRET, "admin", InvocationsApi.secret, "Signing secret of a project's webhooks",
                 unlimited=True, query={"project": DEFAULT}, answer=WebhookSecret),
        Endpoint("POST", WEBHOOK_SECRET, "admin", InvocationsApi.rotate, "Rotate the signing secret",
                 audit="webhook.secret.rotate", unlimited=True, query={"project": DEFAULT}, body=WebhookRotation | None,
                 answer=WebhookSecret),
        Endpoint("GET", "/api/v1/schedules", "read", InvocationsApi.schedules, "List cron schedules",
                 answer=list[ScheduleInfo]),
    ),
    BillingApi: (
        Endpoint("GET", "/api/v1/usage", "read", BillingApi.usage, "Sums of the ledger's rows",
                 query={"function": "", "by": "", **SPAN}, answer=Usage),
        Endpoint("GET", "/api/v1/invoices/{month}", "read", BillingApi.invoice, "Invoice of a month, grouped by price",
                 query={"function": ""}, answer=Invoice),
        Endpoint("GET", "/api/v1/ledger", "read", BillingApi.ledger, "The ledger's rows, a JSON object a line",
                 query={"function": "", **SPAN}, answer=LedgerLine, media=NDJSON),
        Endpoint("GET", "/api/v1/prices", "read", BillingApi.prices, "List price sheets, oldest first",
                 answer=list[PriceSheet]),
        Endpoint("POST", "/api/v1/prices", "admin", BillingApi.add_prices,
                 "Add a price sheet that begins in the future", audit="price.set", kind="price", unlimited=True,
                 body=NewPrices, answer=PriceSheet, status=201),
        Endpoint("GET", "/api/v1/budgets", "read", BillingApi.budgets, "List budgets", answer=list[BudgetInfo]),
        Endpoint("PUT", BUDGET, "admin", BillingApi.set_budget, "Set a function's budget", audit="budget.set",
                 kind="budget", body=BudgetTerms, answer=BudgetInfo),
        Endpoint("DELETE", BUDGET, "admin", BillingApi.remove_budget, "Remove a budget", audit="budget.rm",
                 kind="budget", answer=BudgetInfo),
    ),
    NodesApi: (
        Endpoint("POST", "/api/v1/nodes/join", "node", NodesApi.join,
                 "What a node needs to join: its certificate, Redis with its password, and the store; a token is good "
                 "once", audit="node.join", kind="node", unlimited=True, body=NodeJoin, answer=JoinTerms),
        Endpoint("POST", "/api/v1/certificates", "open", NodesApi.renew,
                 "Renew a node's certificate: the request is signed by the key that it has joined with",
                 body=Renewal, answer=Renewed),
        Endpoint("PUT", f"{NODE}/drain", "admin", NodesApi.drain, "Send a node's workers away, and start none there",
                 audit="node.drain", kind="node", unlimited=True, answer=NodeInfo),
        Endpoint("DELETE", f"{NODE}/drain", "admin", NodesApi.undrain, "Let a node have workers again",
                 audit="node.undrain", kind="node", unlimited=True, answer=NodeInfo),
        Endpoint("DELETE", NODE, "admin", NodesApi.remove, "Forget a node that is gone; `force`: one that lives",
                 audit="node.rm", kind="node", unlimited=True, query={"force": 0}, answer=NodeInfo),
    ),
    KeysApi: (
        Endpoint("GET", "/api/v1/keys", "admin", KeysApi.keys, "List API keys, also revoked ones", unlimited=True,
                 answer=list[KeyInfo]),
        Endpoint("POST", "/api/v1/keys", "admin", KeysApi.create, "Create an API key; its text is returned once",
                 audit="key.create", kind="key", unlimited=True, body=NewKey, answer=KeyCreated, status=201),
        Endpoint("DELETE", "/api/v1/keys/{name}", "admin", KeysApi.revoke, "Revoke a key", audit="key.revoke",
                 kind="key", unlimited=True, answer=KeyInfo),
        Endpoint("POST", "/api/v1/keys/{name}/rotate", "admin", KeysApi.rotate,
                 "Rotate a key; the old text works for a grace period", audit="key.rotate", kind="key", unlimited=True,
                 body=Rotation, answer=KeyCreated),
    ),
    ProjectsApi: (
        Endpoint("GET", "/api/v1/projects", "read", ProjectsApi.projects, "List projects", answer=list[ProjectInfo]),
        Endpoint("PUT", PROJECT, "admin", ProjectsApi.set, "Create a project, or set its quotas", audit="project.set",
                 kind="project", unlimited=True, body=ProjectTerms, answer=ProjectInfo),
        Endpoint("DELETE", PROJECT, "admin", ProjectsApi.remove, "Remove an empty project", audit="project.rm",
                 kind="project", unlimited=True, answer=ProjectInfo),
    ),
    SecretsApi: (
        Endpoint("GET", "/api/v1/secrets", "read", SecretsApi.secrets, "List secrets, without their values",
                 answer=list[SecretInfo]),
        Endpoint("PUT", SECRET, "deploy", SecretsApi.set, "Set a secret", audit="secret.set", kind="secret",
                 body=SecretValue, answer=SecretInfo),
        Endpoint("DELETE", SECRET, "deploy", SecretsApi.remove, "Remove a secret, unless a function uses it",
                 audit="secret.rm", kind="secret", query={"force": 0}, answer=SecretInfo),
        Endpoint("POST", "/api/v1/secrets/rekey", "admin", SecretsApi.rekey,
                 "Encrypt all secrets with a new master key", audit="secret.rekey", kind="secret", unlimited=True,
                 answer=Rekeyed),
    ),
    VolumesApi: (
        Endpoint("GET", "/api/v1/volumes", "read", VolumesApi.volumes, "List volumes with their versions",
                 answer=list[VolumeInfo]),
        Endpoint("GET", VOLUME, "read", VolumesApi.volume, "A volume with its versions", kind="volume",
                 answer=VolumeInfo),
        Endpoint("PUT", VOLUME, "deploy", VolumesApi.create, "Create a volume; one that exists stays as it is",
                 audit="volume.create", kind="volume", answer=VolumeInfo),
        Endpoint("DELETE", VOLUME, "deploy", VolumesApi.remove, "Remove a volume, unless a function uses it",
                 audit="volume.rm", kind="volume", answer=VolumeInfo),
        Endpoint("POST", f"{VOLUME}/versions", "deploy", VolumesApi.publish,
                 "Add a version, unless another one came after the one that it is based on", audit="volume.put",
                 kind="volume", body=NewVolumeVersion, answer=VolumeInfo, status=201),
        Endpoint("POST", f"{VOLUME}/prune", "deploy", VolumesApi.prune,
                 "Remove old versions, but those that functions name", audit="volume.prune", kind="volume",
                 body=PruneTerms, answer=Pruned),
    ),
}
# fmt: on


def endpoints() -> list[Endpoint]:
    """All endpoints, in the table's order."""
    return [endpoint for group in ENDPOINTS.values() for endpoint in group]


def routes_of(apis: Iterable[object]) -> list[BaseRoute]:
    """The routes of all endpoints. `apis` has one instance of each class in the table; KeyError: one is missing."""
    by_class = {type(api): api for api in apis}
    return [endpoint.route(by_class[kind]) for kind, group in ENDPOINTS.items() for endpoint in group]


def route_rules() -> list[RouteRule]:
    """The permission rules of all routes, for the auth middleware."""
    return [endpoint.rule() for endpoint in endpoints()]


def markdown_table() -> str:
    """The endpoints as a Markdown table, for `docs/http.md`."""
    lines = ["| endpoint | permission | body | response | description |", "| --- | --- | --- | --- | --- |"]
    lines += [
        f"| `{one.method} {_url(one)}` | {one.permission} | {_type_name(one.body)} | {_answer(one)} | {one.summary} |"
        for one in endpoints()
    ]
    return "\n".join(lines) + "\n"


def _url(endpoint: Endpoint) -> str:
    query = "&".join(
        f"{name}={'' if isinstance(default, type) else default}" for name, default in endpoint.query.items()
    )
    path = endpoint.path.replace(":path}", "}")
    return f"{path}?{query}" if query else path


def _answer(endpoint: Endpoint) -> str:
    lines = " a line" if endpoint.media == NDJSON else ""
    status = f" ({endpoint.status})" if endpoint.status != 200 else ""
    return f"{_type_name(endpoint.answer)}{lines}{status}".strip()


def _type_name(kind: Any) -> str:
    if kind is None:
        return ""
    if get_origin(kind) is list:
        return f"[{_type_name(get_args(kind)[0])}]"
    if args := get_args(kind):
        return " or ".join("nothing" if arg is type(None) else _type_name(arg) for arg in args)
    return str(kind.__name__) if issubclass(kind, msgspec.Struct) else {dict: "object", str: "text"}.get(kind, "bytes")
