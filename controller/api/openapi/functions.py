"""Functions: deploys, versions, and which of them calls go to."""

from __future__ import annotations

from typing import Any

import msgspec

from fleetstart.runtime.contract.billing.ledger import LogLine
from fleetstart.runtime.contract.function.spec import FunctionSpec

from ...schemas.functions import Deployed, FunctionInfo, Share, Traffic, VersionInfo, VersionRef
from ...schemas.planning import Forecast, Proposal
from ...state.records import ScaleOverride
from .operation import in_path, in_query, listed, operation, optional, ref

STRUCTS: tuple[type[msgspec.Struct], ...] = (
    Deployed,
    Forecast,
    FunctionInfo,
    FunctionSpec,
    LogLine,
    Proposal,
    ScaleOverride,
    Share,
    Traffic,
    VersionInfo,
    VersionRef,
)
ONE = "/api/v1/functions/{name}"


def paths() -> dict[str, Any]:
    name = in_path("name")
    return {
        "/api/v1/functions": {
            "get": operation("All functions", listed(FunctionInfo)),
            "post": operation(
                "Deploy",
                ref(Deployed),
                in_query("alias"),
                in_query("percent", "integer"),
                in_query("probe", "integer"),
                body=ref(FunctionSpec),
            ),
        },
        "/api/v1/forecast": {"post": operation("What a deploy would come to", ref(Forecast), body=ref(Proposal))},
        ONE: {
            "get": operation("One function", ref(FunctionInfo), name),
            "delete": operation("Delete it and drain its workers", ref(FunctionInfo), name),
        },
        f"{ONE}/logs": {
            "get": operation(
                "Its log, a line of JSON each",
                ref(LogLine),
                name,
                in_query("tail", "integer"),
                in_query("follow", "integer"),
                media="application/x-ndjson",
            )
        },
        f"{ONE}/openapi.json": {
            "get": operation("What its calls take and give, as OpenAPI", {"type": "object"}, name, in_query("version"))
        },
        f"{ONE}/versions": {"get": operation("All its versions, newest first", listed(VersionInfo), name)},
        **_traffic_paths(),
    }


def _traffic_paths() -> dict[str, Any]:
    name, alias = in_path("name"), in_path("alias")
    return {
        f"{ONE}/traffic": {"get": operation("Which versions calls go to", ref(Traffic), name)},
        f"{ONE}/aliases/{{alias}}": {
            "put": operation("Point an alias at a version", ref(Traffic), name, alias, body=ref(VersionRef)),
            "delete": operation("Remove an alias", ref(Traffic), name, alias),
        },
        f"{ONE}/split": {"put": operation("Split the calls of live", ref(Traffic), name, body=listed(Share))},
        f"{ONE}/rollback": {
            "post": operation(
                "Go back to a version, or undo the last change", ref(Traffic), name, body=optional(VersionRef)
            )
        },
        f"{ONE}/scale": {"put": operation("Scale without a deploy", ref(Traffic), name, body=optional(ScaleOverride))},
    }
