"""The OpenAPI document of the management API, made from the table of endpoints and the structs that it names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, get_args, get_origin

import msgspec

from fleetstart.runtime.contract.errors import ErrorBody

from .endpoint import JSON, Endpoint

REF = "#/components/schemas/{name}"
_PLAIN: dict[type, dict[str, Any]] = {
    dict: {"type": "object"},
    str: {"type": "string"},
    bytes: {"type": "string", "format": "binary"},
}


def document(endpoints: Iterable[Endpoint], url: str) -> dict[str, Any]:
    """The document, for a server at `url`."""
    documented = [endpoint for endpoint in endpoints if endpoint.documented]
    structs: dict[type, None] = {ErrorBody: None}
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in documented:
        structs |= dict.fromkeys((*_structs(endpoint.body), *_structs(endpoint.answer)))
        path = endpoint.path.replace(":path}", "}")
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, path)
    _, schemas = msgspec.json.schema_components(list(structs), ref_template=REF)
    return {
        "openapi": "3.1.0",
        "info": {"title": "fleetstart", "version": "1"},
        "servers": [{"url": url}],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


def _operation(endpoint: Endpoint, path: str) -> dict[str, Any]:
    content = {"content": {endpoint.media: {"schema": _schema(endpoint.answer)}}} if endpoint.answer else {}
    described: dict[str, Any] = {
        "summary": endpoint.summary,
        "parameters": [
            *(_parameter(name, "path", "string") for name in re.findall(r"\{(\w+)\}", path)),
            *(_parameter(name, "query", _query_type(default)) for name, default in endpoint.query.items()),
            *(_parameter(name, "header", "string") for name in endpoint.headers),
        ],
        "responses": {
            str(endpoint.status): {"description": "done", **content},
            "default": {
                "description": "an error, with the status of its class",
                "content": {JSON: {"schema": _schema(ErrorBody)}},
            },
        },
    }
    if endpoint.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": _schema(endpoint.body)}}}
    return described


def _parameter(name: str, where: str, kind: str) -> dict[str, Any]:
    return {"name": name, "in": where, "required": where == "path", "schema": {"type": kind}}


def _query_type(default: str | int | type) -> str:
    return "string" if isinstance(default, str) else "integer"


def _schema(kind: Any) -> dict[str, Any]:
    if kind in _PLAIN:
        return _PLAIN[kind]
    if kind is type(None):
        return {"type": "null"}
    if get_origin(kind) is list:
        return {"type": "array", "items": _schema(get_args(kind)[0])}
    if args := get_args(kind):
        return {"anyOf": [_schema(arg) for arg in args]}
    return {"$ref": REF.format(name=kind.__name__)}


def _structs(kind: Any) -> list[type]:
    """The structs that a type names."""
    if args := get_args(kind):
        return [struct for arg in args for struct in _structs(arg)]
    return [kind] if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else []
