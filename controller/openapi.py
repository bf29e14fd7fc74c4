"""The OpenAPI description of the management API; schemas come from the structs that the handlers really use."""

from __future__ import annotations

from typing import Any

import msgspec

from fleetstart.controller.access.audit_event import AuditEvent
from fleetstart.controller.access.resources import (
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
from fleetstart.controller.explain import InvocationPlan
from fleetstart.controller.forecast import Forecast, Proposal
from fleetstart.controller.invocations import description
from fleetstart.controller.records import Scaled
from fleetstart.controller.resources import (
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
from fleetstart.controller.seeing.activity import Activity
from fleetstart.runtime.contract.errors import ErrorBody
from fleetstart.runtime.contract.function import FunctionSpec
from fleetstart.runtime.contract.ledger import InvocationRow, InvocationTrace, LogLine
from fleetstart.runtime.contract.manifest import Manifest
from fleetstart.runtime.contract.prices import PriceSheet

_STRUCTS = (
    CheckpointInfo,
    Deployed,
    FunctionInfo,
    SystemStatus,
    Usage,
    Invoice,
    LedgerLine,
    PriceSheet,
    NewPrices,
    BudgetInfo,
    BudgetTerms,
    VersionInfo,
    VersionRef,
    Proposal,
    Forecast,
    Share,
    Traffic,
    Scaled,
    FunctionSpec,
    InvocationRow,
    InvocationTrace,
    InvocationPlan,
    Activity,
    LogLine,
    Manifest,
    ErrorBody,
    *description.STRUCTS,
    KeyInfo,
    KeyCreated,
    NewKey,
    Rotation,
    ProjectInfo,
    ProjectTerms,
    SecretInfo,
    SecretValue,
    Rekeyed,
    AuditEvent,
)
_REF = "#/components/schemas/{name}"


def document(url: str) -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(_STRUCTS, ref_template=_REF)
    return {
        "openapi": "3.1.0",
        "info": {"title": "fleetstart", "version": "1"},
        "servers": [{"url": url}],
        "paths": _paths(),
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


def _paths() -> dict[str, Any]:
    name, key, alias = _parameter("name", "path"), _parameter("key", "path"), _parameter("alias", "path")
    function, limit = _parameter("function", "query"), _parameter("limit", "query", "integer")
    return {
        "/healthz": {"get": _operation("Whether this process serves; wakes and bills nothing", {"type": "object"})},
        "/api/v1/status": {"get": _operation("The whole system", _ref(SystemStatus))},
        "/api/v1/objects/{key}": {
            "head": _operation("Whether an object is in the store", None, [key]),
            "get": _operation(
                "An object, or one range of it",
                {"type": "string", "format": "binary"},
                [key, _parameter("range", "header")],
                media="application/octet-stream",
            ),
            "put": _operation("Upload a bundle or a checkpoint's object", {"type": "object"}, [key], status="201"),
        },
        "/api/v1/checkpoints": {
            "get": _operation(
                "All checkpoints, newest first",
                _list(CheckpointInfo),
                [_parameter("unfinished", "query", "integer")],
            )
        },
        "/api/v1/checkpoints/{id}": {
            "get": _operation("Its manifest", _ref(Manifest), [_parameter("id", "path")]),
            "delete": _operation(
                "Remove it, unless a version of a deployed function uses it",
                _ref(CheckpointInfo),
                [_parameter("id", "path")],
            ),
        },
        "/api/v1/functions": {
            "get": _operation("All functions", _list(FunctionInfo)),
            "post": _operation(
                "Deploy",
                _ref(Deployed),
                [
                    _parameter("alias", "query"),
                    _parameter("percent", "query", "integer"),
                    _parameter("probe", "query", "integer"),
                ],
                body=_ref(FunctionSpec),
            ),
        },
        "/api/v1/forecast": {"post": _operation("What a deploy would come to", _ref(Forecast), body=_ref(Proposal))},
        "/api/v1/functions/{name}": {
            "get": _operation("One function", _ref(FunctionInfo), [name]),
            "delete": _operation("Delete it and drain its workers", _ref(FunctionInfo), [name]),
        },
        "/api/v1/functions/{name}/versions": {
            "get": _operation("All its versions, newest first", _list(VersionInfo), [name])
        },
        "/api/v1/functions/{name}/traffic": {"get": _operation("Which versions calls go to", _ref(Traffic), [name])},
        "/api/v1/functions/{name}/aliases/{alias}": {
            "put": _operation("Point an alias at a version", _ref(Traffic), [name, alias], body=_ref(VersionRef)),
            "delete": _operation("Remove an alias", _ref(Traffic), [name, alias]),
        },
        "/api/v1/functions/{name}/split": {
            "put": _operation("Split the calls of live", _ref(Traffic), [name], body=_list(Share))
        },
        "/api/v1/functions/{name}/rollback": {
            "post": _operation(
                "Go back to a version, or undo the last change",
                _ref(Traffic),
                [name],
                body={"anyOf": [_ref(VersionRef), {"type": "null"}]},
            )
        },
        "/api/v1/functions/{name}/scale": {
            "put": _operation(
                "Scale without a deploy", _ref(Traffic), [name], body={"anyOf": [_ref(Scaled), {"type": "null"}]}
            )
        },
        "/api/v1/functions/{name}/logs": {
            "get": _operation(
                "Its log, a line of JSON each",
                _ref(LogLine),
                [name, _parameter("tail", "query", "integer"), _parameter("follow", "query", "integer")],
                media="application/x-ndjson",
            )
        },
        "/api/v1/functions/{name}/openapi.json": {
            "get": _operation(
                "What its calls take and give, as OpenAPI", {"type": "object"}, [name, _parameter("version", "query")]
            )
        },
        "/api/v1/activity": {"get": _operation("The last minutes, by function", _ref(Activity))},
        "/api/v1/invocations": {"get": _operation("Newest first", _list(InvocationRow), [function, limit])},
        "/api/v1/invocations/{id}": {
            "get": _operation(
                "One invocation and its timeline",
                {"anyOf": [_ref(InvocationTrace), _ref(description.InvocationInfo)]},
                [_parameter("id", "path")],
            ),
            **_invocation_paths().pop("/api/v1/invocations/{id}"),
        },
        "/api/v1/invocations/{id}/plan": {
            "get": _operation(
                "Why its worker was started as it was, and what came of it",
                _ref(InvocationPlan),
                [_parameter("id", "path")],
            )
        },
        **{path: item for path, item in _invocation_paths().items() if path != "/api/v1/invocations/{id}"},
        **_billing_paths(),
        **_access_paths(),
    }


def _invocation_paths() -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for route in description.ROUTES:
        answer = _ref(route.answer) if route.answer is not None else {"type": "string"}
        paths.setdefault(route.path, {})[route.method] = _operation(
            route.summary,
            {"type": "array", "items": answer} if route.listed else answer,
            [_parameter("id", "path")] * ("{id}" in route.path) + [_parameter(n, "query", k) for n, k in route.query],
            status=route.status,
            media=route.media,
            body={"anyOf": [_ref(route.body), {"type": "null"}]} if route.body is not None else None,
        )
    return paths


def _billing_paths() -> dict[str, Any]:
    function = _parameter("function", "query")
    span = [_parameter(name, "query", "integer") for name in ("since_unix_ms", "until_unix_ms")]
    return {
        "/api/v1/usage": {
            "get": _operation("Sums of the ledger", _ref(Usage), [function, _parameter("by", "query"), *span])
        },
        "/api/v1/invoices/{month}": {
            "get": _operation(
                "All rows of a month, by what determines their price",
                _ref(Invoice),
                [_parameter("month", "path"), function],
            )
        },
        "/api/v1/ledger": {
            "get": _operation(
                "The rows, a line of JSON each", _ref(LedgerLine), [function, *span], media="application/x-ndjson"
            )
        },
        "/api/v1/prices": {
            "get": _operation("All price sheets, the first one first", _list(PriceSheet)),
            "post": _operation(
                "Rates from a moment that is still to come", _ref(PriceSheet), status="201", body=_ref(NewPrices)
            ),
        },
        "/api/v1/budgets": {"get": _operation("All budgets", _list(BudgetInfo))},
        "/api/v1/budgets/{function}": {
            "put": _operation(
                "What a function may cost", _ref(BudgetInfo), [_parameter("function", "path")], body=_ref(BudgetTerms)
            ),
            "delete": _operation("Take the budget away", _ref(BudgetInfo), [_parameter("function", "path")]),
        },
    }


def _access_paths() -> dict[str, Any]:
    name, project = _parameter("name", "path"), _parameter("project", "path")
    span = [_parameter("since_unix_ms", "query", "integer"), _parameter("limit", "query", "integer")]
    return {
        "/api/v1/keys": {
            "get": _operation("All keys, the revoked ones too", _list(KeyInfo)),
            "post": _operation(
                "Make a key; its text is shown this once", _ref(KeyCreated), status="201", body=_ref(NewKey)
            ),
        },
        "/api/v1/keys/{name}": {"delete": _operation("Revoke it", _ref(KeyInfo), [name])},
        "/api/v1/keys/{name}/rotate": {
            "post": _operation(
                "Another text for it; the old one is good for a while", _ref(KeyCreated), [name], body=_ref(Rotation)
            )
        },
        "/api/v1/projects": {"get": _operation("All projects", _list(ProjectInfo))},
        "/api/v1/projects/{name}": {
            "put": _operation("Make it, or set its quotas", _ref(ProjectInfo), [name], body=_ref(ProjectTerms)),
            "delete": _operation("Remove it, if it is empty", _ref(ProjectInfo), [name]),
        },
        "/api/v1/secrets": {"get": _operation("All secrets, without their values", _list(SecretInfo))},
        "/api/v1/secrets/{project}/{name}": {
            "put": _operation("Set it", _ref(SecretInfo), [project, name], body=_ref(SecretValue)),
            "delete": _operation(
                "Remove it, unless a function uses it",
                _ref(SecretInfo),
                [project, name, _parameter("force", "query", "integer")],
            ),
        },
        "/api/v1/secrets/rekey": {"post": _operation("Encrypt all with another master key", _ref(Rekeyed))},
        "/api/v1/audit": {
            "get": _operation("Who changed what, newest first", _list(AuditEvent), [_parameter("by", "query"), *span])
        },
    }


def _ref(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {"$ref": _REF.format(name=struct.__name__)}


def _list(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {"type": "array", "items": _ref(struct)}


def _parameter(name: str, where: str, kind: str = "string") -> dict[str, Any]:
    return {"name": name, "in": where, "required": where == "path", "schema": {"type": kind}}


def _operation(
    summary: str,
    answer: dict[str, Any] | None,
    parameters: list[dict[str, Any]] | None = None,
    *,
    status: str = "200",
    body: dict[str, Any] | None = None,
    media: str = "application/json",
) -> dict[str, Any]:
    content = {"content": {media: {"schema": answer}}} if answer is not None else {}
    operation: dict[str, Any] = {
        "summary": summary,
        "parameters": parameters or [],
        "responses": {
            status: {"description": "done", **content},
            "default": {
                "description": "an error, with the status of its class",
                "content": {"application/json": {"schema": _ref(ErrorBody)}},
            },
        },
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation
