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
    Usage,
    VersionInfo,
    VersionRef,
)
from ..schemas.invocations import InvocationInfo, ReplayTerms, ScheduleInfo, WebhookSecret
from ..schemas.planning import Forecast, InvocationPlan, Proposal
from ..shell.service import ShellService
from ..state.access_records import DEFAULT
from ..state.records import ScaleOverride
from .billing import BillingApi
from .endpoint import Endpoint
from .functions import FunctionsApi
from .invocations import LIMIT as ASYNC_LIMIT
from .invocations import InvocationsApi
from .keys import KeysApi
from .metrics import ObservabilityApi
from .objects import BYTES, ObjectsApi
from .projects import ProjectsApi
from .secrets import SecretsApi
from .system import AUDIT_ROWS, SystemApi
from .traces import LIMIT, TracesApi
from .versions import VersionsApi

NDJSON = "application/x-ndjson"
OBJECT = "/api/v1/objects/{key:path}"
CHECKPOINT = "/api/v1/checkpoints/{id}"
FUNCTION = "/api/v1/functions/{name}"
ALIAS = f"{FUNCTION}/aliases/{{alias}}"
INVOCATION = "/api/v1/invocations/{id}"
WEBHOOK_SECRET = "/api/v1/webhooks/secret"
BUDGET = "/api/v1/budgets/{function}"
PROJECT = "/api/v1/projects/{name}"
SECRET = "/api/v1/secrets/{project}/{name}"
SPAN: dict[str, str | int | type[int]] = {"since_unix_ms": 0, "until_unix_ms": int}

# fmt: off
ENDPOINTS: dict[type, tuple[Endpoint, ...]] = {
    SystemApi: (
        Endpoint("GET", "/healthz", "open", SystemApi.healthz,
                 "Whether this process serves; wakes and bills nothing", answer=dict),
        Endpoint("GET", "/openapi.json", "key", SystemApi.openapi, "This API, as OpenAPI",
                 answer=dict, documented=False, before_sync=True),
        Endpoint("GET", "/api/v1/status", "read", SystemApi.status, "The whole system",
                 answer=SystemStatus, before_sync=True),
        Endpoint("GET", "/api/v1/audit", "admin", SystemApi.audit, "Who changed what, newest first", unlimited=True,
                 query={"by": "", "since_unix_ms": 0, "limit": AUDIT_ROWS}, answer=list[AuditEvent]),
    ),
    ObservabilityApi: (
        Endpoint("GET", "/metrics", "read", ObservabilityApi.metrics, "Metrics in Prometheus' text format",
                 answer=str, media="text/plain", documented=False),
        Endpoint("GET", "/", "open", ObservabilityApi.home, "Redirects to the dashboard", status=302, documented=False),
        Endpoint("GET", "/ui", "open", ObservabilityApi.home, "Redirects to the dashboard", status=302,
                 documented=False),
        Endpoint("GET", "/ui/{file:path}", "open", ObservabilityApi.file, "The dashboard's files, which hold no data",
                 answer=str, media="text/html", documented=False),
        Endpoint("GET", "/api/v1/activity", "read", ObservabilityApi.activity, "The last minutes, by function",
                 answer=Activity),
    ),
    ObjectsApi: (
        Endpoint("HEAD", OBJECT, "read", ObjectsApi.head_object, "Whether an object is in the store", kind="object"),
        Endpoint("GET", OBJECT, "read", ObjectsApi.get_object, "An object, or one range of it", kind="object",
                 headers=("range",), answer=bytes, media=BYTES),
        Endpoint("PUT", OBJECT, "deploy", ObjectsApi.put_object, "Upload a bundle or a checkpoint's object",
                 kind="object", answer=dict, status=201),
        Endpoint("GET", "/api/v1/checkpoints", "read", ObjectsApi.list_checkpoints, "All checkpoints, newest first",
                 unlimited=True, query={"unfinished": 0}, answer=list[CheckpointInfo]),
        Endpoint("GET", CHECKPOINT, "read", ObjectsApi.get_manifest, "Its manifest", kind="checkpoint",
                 answer=Manifest),
        Endpoint("DELETE", CHECKPOINT, "deploy", ObjectsApi.delete_checkpoint,
                 "Remove it, unless a version of a deployed function uses it", audit="checkpoint.rm",
                 kind="checkpoint", unlimited=True, answer=CheckpointInfo),
    ),
    FunctionsApi: (
        Endpoint("GET", "/api/v1/functions", "read", FunctionsApi.functions, "All functions",
                 answer=list[FunctionInfo]),
        Endpoint("POST", "/api/v1/functions", "deploy", FunctionsApi.deploy, "Deploy", audit="function.deploy",
                 kind="function", query={"alias": LIVE, "percent": 100, "probe": 0}, body=FunctionSpec,
                 answer=Deployed),
        Endpoint("POST", "/api/v1/forecast", "deploy", FunctionsApi.forecast, "What a deploy would come to",
                 body=Proposal, answer=Forecast),
        Endpoint("GET", FUNCTION, "read", FunctionsApi.function, "One function", kind="function", answer=FunctionInfo),
        Endpoint("DELETE", FUNCTION, "deploy", FunctionsApi.delete, "Delete it and drain its workers",
                 audit="function.rm", kind="function", answer=FunctionInfo),
        Endpoint("GET", f"{FUNCTION}/logs", "read", FunctionsApi.logs, "Its log, a line of JSON each", kind="function",
                 query={"tail": 100, "follow": 0}, answer=LogLine, media=NDJSON),
        Endpoint("GET", f"{FUNCTION}/openapi.json", "key", FunctionsApi.interface,
                 "What its calls take and give, as OpenAPI", kind="function", query={"version": LIVE}, answer=dict),
    ),
    VersionsApi: (
        Endpoint("GET", f"{FUNCTION}/versions", "read", VersionsApi.versions, "All its versions, newest first",
                 kind="function", answer=list[VersionInfo]),
        Endpoint("GET", f"{FUNCTION}/traffic", "read", VersionsApi.traffic, "Which versions calls go to",
                 kind="function", answer=Traffic),
        Endpoint("PUT", ALIAS, "deploy", VersionsApi.set_alias, "Point an alias at a version", audit="function.alias",
                 kind="function", body=VersionRef, answer=Traffic),
        Endpoint("DELETE", ALIAS, "deploy", VersionsApi.delete_alias, "Remove an alias", audit="function.alias.rm",
                 kind="function", answer=Traffic),
        Endpoint("PUT", f"{FUNCTION}/split", "deploy", VersionsApi.split, "Split the calls of live",
                 audit="function.split", kind="function", body=list[Share], answer=Traffic),
        Endpoint("POST", f"{FUNCTION}/rollback", "deploy", VersionsApi.rollback,
                 "Go back to a version, or undo the last change", audit="function.rollback", kind="function",
                 body=VersionRef | None, answer=Traffic),
        Endpoint("PUT", f"{FUNCTION}/scale", "deploy", VersionsApi.scale, "Scale without a deploy",
                 audit="function.scale", kind="function", body=ScaleOverride | None, answer=Traffic),
    ),
    ShellService: (
        Endpoint(SOCKET, f"{FUNCTION}/shell", "deploy", ShellService.__call__, "A shell in the environment of a worker",
                 audit="function.shell", kind="function", query={"version": LIVE, "idle_s": int(IDLE_S)},
                 documented=False),
    ),
    TracesApi: (
        Endpoint("GET", "/api/v1/invocations", "read", TracesApi.invocations, "Newest first",
                 query={"function": "", "limit": LIMIT}, answer=list[InvocationRow]),
        # A key that may call may also fetch the outcome; the handler checks that the function is one of the key's.
        Endpoint("GET", INVOCATION, "key", TracesApi.invocation, "One invocation and its timeline", kind="invocation",
                 answer=InvocationTrace | InvocationInfo),
        Endpoint("GET", f"{INVOCATION}/plan", "read", TracesApi.plan,
                 "Why its worker was started as it was, and what came of it", kind="invocation", answer=InvocationPlan),
    ),
    InvocationsApi: (
        Endpoint("DELETE", INVOCATION, "invoke", InvocationsApi.cancel, "Cancel it, also while it runs",
                 audit="invocation.cancel", kind="invocation", answer=InvocationInfo),
        Endpoint("GET", "/api/v1/async", "read", InvocationsApi.kept, "Invocations that are kept, newest first",
                 query={"function": "", "status": "", "dead": 0, "limit": ASYNC_LIMIT}, answer=list[InvocationInfo]),
        Endpoint("POST", f"{INVOCATION}/cancel", "invoke", InvocationsApi.cancel, "Cancel it, also while it runs",
                 audit="invocation.cancel", kind="invocation", answer=InvocationInfo),
        Endpoint("GET", f"{INVOCATION}/result", "invoke", InvocationsApi.result, "What was answered, as it was",
                 kind="invocation", answer=str, media="*/*"),
        Endpoint("GET", f"{INVOCATION}/events", "invoke", InvocationsApi.events, "Its events, from Last-Event-ID on",
                 kind="invocation", answer=str, media="text/event-stream"),
        Endpoint("POST", f"{INVOCATION}/redrive", "invoke", InvocationsApi.redrive,
                 "Run one that did not succeed once more", audit="invocation.redrive", kind="invocation",
                 answer=InvocationInfo),
        Endpoint("POST", f"{INVOCATION}/replay", "invoke", InvocationsApi.replay, "Run its request again as a new one",
                 audit="invocation.replay", kind="invocation", body=ReplayTerms | None, answer=InvocationInfo,
                 status=202),
        Endpoint("POST", f"{INVOCATION}/redeliver", "invoke", InvocationsApi.redeliver, "Send its webhook again",
                 audit="invocation.redeliver", kind="invocation", answer=InvocationInfo),
        Endpoint("GET", WEBHOOK_SECRET, "admin", InvocationsApi.secret, "What a project's webhooks are signed with",
                 unlimited=True, query={"project": DEFAULT}, answer=WebhookSecret),
        Endpoint("POST", WEBHOOK_SECRET, "admin", InvocationsApi.rotate, "Another secret from now on",
                 audit="webhook.secret.rotate", unlimited=True, query={"project": DEFAULT}, answer=WebhookSecret),
        Endpoint("GET", "/api/v1/schedules", "read", InvocationsApi.schedules, "Functions that are called by the clock",
                 answer=list[ScheduleInfo]),
    ),
    BillingApi: (
        Endpoint("GET", "/api/v1/usage", "read", BillingApi.usage, "Sums of the ledger",
                 query={"function": "", "by": "", **SPAN}, answer=Usage),
        Endpoint("GET", "/api/v1/invoices/{month}", "read", BillingApi.invoice,
                 "All rows of a month, by what determines their price", query={"function": ""}, answer=Invoice),
        Endpoint("GET", "/api/v1/ledger", "read", BillingApi.ledger, "The rows, a line of JSON each",
                 query={"function": "", **SPAN}, answer=LedgerLine, media=NDJSON),
        Endpoint("GET", "/api/v1/prices", "read", BillingApi.prices, "All price sheets, the first one first",
                 answer=list[PriceSheet]),
        Endpoint("POST", "/api/v1/prices", "admin", BillingApi.add_prices,
                 "Rates from a moment that is still to come", audit="price.set", kind="price", unlimited=True,
                 body=NewPrices, answer=PriceSheet, status=201),
        Endpoint("GET", "/api/v1/budgets", "read", BillingApi.budgets, "All budgets", answer=list[BudgetInfo]),
        Endpoint("PUT", BUDGET, "admin", BillingApi.set_budget, "What a function may cost", audit="budget.set",
                 kind="budget", body=BudgetTerms, answer=BudgetInfo),
        Endpoint("DELETE", BUDGET, "admin", BillingApi.remove_budget, "Take the budget away", audit="budget.rm",
                 kind="budget", answer=BudgetInfo),
    ),
    KeysApi: (
        Endpoint("GET", "/api/v1/keys", "admin", KeysApi.keys, "All keys, the revoked ones too", unlimited=True,
                 answer=list[KeyInfo]),
        Endpoint("POST", "/api/v1/keys", "admin", KeysApi.create, "Make a key; its text is shown this once",
                 audit="key.create", kind="key", unlimited=True, body=NewKey, answer=KeyCreated, status=201),
        Endpoint("DELETE", "/api/v1/keys/{name}", "admin", KeysApi.revoke, "Revoke it", audit="key.revoke", kind="key",
                 unlimited=True, answer=KeyInfo),
        Endpoint("POST", "/api/v1/keys/{name}/rotate", "admin", KeysApi.rotate,
                 "Another text for it; the old one is good for a while", audit="key.rotate", kind="key",
                 unlimited=True, body=Rotation, answer=KeyCreated),
    ),
    ProjectsApi: (
        Endpoint("GET", "/api/v1/projects", "read", ProjectsApi.projects, "All projects", answer=list[ProjectInfo]),
        Endpoint("PUT", PROJECT, "admin", ProjectsApi.set, "Make it, or set its quotas", audit="project.set",
                 kind="project", unlimited=True, body=ProjectTerms, answer=ProjectInfo),
        Endpoint("DELETE", PROJECT, "admin", ProjectsApi.remove, "Remove it, if it is empty", audit="project.rm",
                 kind="project", unlimited=True, answer=ProjectInfo),
    ),
    SecretsApi: (
        Endpoint("GET", "/api/v1/secrets", "read", SecretsApi.secrets, "All secrets, without their values",
                 answer=list[SecretInfo]),
        Endpoint("PUT", SECRET, "deploy", SecretsApi.set, "Set it", audit="secret.set", kind="secret",
                 body=SecretValue, answer=SecretInfo),
        Endpoint("DELETE", SECRET, "deploy", SecretsApi.remove, "Remove it, unless a function uses it",
                 audit="secret.rm", kind="secret", query={"force": 0}, answer=SecretInfo),
        Endpoint("POST", "/api/v1/secrets/rekey", "admin", SecretsApi.rekey, "Encrypt all with another master key",
                 audit="secret.rekey", kind="secret", unlimited=True, answer=Rekeyed),
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
    """What the auth middleware demands of each route."""
    return [endpoint.rule() for endpoint in endpoints()]


def markdown_table() -> str:
    """The endpoints as a Markdown table, for `docs/http.md`."""
    lines = ["| endpoint | permission | body | answer | |", "| --- | --- | --- | --- | --- |"]
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
