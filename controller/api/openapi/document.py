"""The whole description; schemas come from the structs that the handlers really use."""

from __future__ import annotations

from typing import Any

import msgspec

from fleetstart.runtime.contract.errors import ErrorBody

from . import access, billing, functions, invocations, system
from .operation import REF

TOPICS = (system, functions, invocations, billing, access)


def document(url: str) -> dict[str, Any]:
    structs: list[type[msgspec.Struct]] = [ErrorBody]
    paths: dict[str, Any] = {}
    for topic in TOPICS:
        structs += topic.STRUCTS
        paths |= topic.paths()
    _, schemas = msgspec.json.schema_components(structs, ref_template=REF)
    return {
        "openapi": "3.1.0",
        "info": {"title": "fleetstart", "version": "1"},
        "servers": [{"url": url}],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }
