"""One operation as OpenAPI writes it, and what it is made of."""

from __future__ import annotations

from typing import Any

import msgspec

from fleetstart.runtime.contract.errors import ErrorBody

REF = "#/components/schemas/{name}"


def ref(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {"$ref": REF.format(name=struct.__name__)}


def listed(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {"type": "array", "items": ref(struct)}


def optional(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {"anyOf": [ref(struct), {"type": "null"}]}


def in_path(name: str) -> dict[str, Any]:
    return _parameter(name, "path", "string")


def in_query(name: str, kind: str = "string") -> dict[str, Any]:
    return _parameter(name, "query", kind)


def in_header(name: str) -> dict[str, Any]:
    return _parameter(name, "header", "string")


def _parameter(name: str, where: str, kind: str) -> dict[str, Any]:
    return {"name": name, "in": where, "required": where == "path", "schema": {"type": kind}}


def operation(
    summary: str,
    answer: dict[str, Any] | None,
    *parameters: dict[str, Any],
    status: str = "200",
    body: dict[str, Any] | None = None,
    media: str = "application/json",
) -> dict[str, Any]:
    content = {"content": {media: {"schema": answer}}} if answer is not None else {}
    described: dict[str, Any] = {
        "summary": summary,
        "parameters": list(parameters),
        "responses": {
            status: {"description": "done", **content},
            "default": {
                "description": "an error, with the status of its class",
                "content": {"application/json": {"schema": ref(ErrorBody)}},
            },
        },
    }
    if body is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return described
