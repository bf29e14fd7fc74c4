"""Keys, projects, secrets, and who changed what."""

from __future__ import annotations

from typing import Any

import msgspec

from ...schemas.access import (
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
from .operation import in_path, in_query, listed, operation, ref

STRUCTS: tuple[type[msgspec.Struct], ...] = (
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


def paths() -> dict[str, Any]:
    name, project = in_path("name"), in_path("project")
    return {
        "/api/v1/keys": {
            "get": operation("All keys, the revoked ones too", listed(KeyInfo)),
            "post": operation(
                "Make a key; its text is shown this once", ref(KeyCreated), status="201", body=ref(NewKey)
            ),
        },
        "/api/v1/keys/{name}": {"delete": operation("Revoke it", ref(KeyInfo), name)},
        "/api/v1/keys/{name}/rotate": {
            "post": operation(
                "Another text for it; the old one is good for a while", ref(KeyCreated), name, body=ref(Rotation)
            )
        },
        "/api/v1/projects": {"get": operation("All projects", listed(ProjectInfo))},
        "/api/v1/projects/{name}": {
            "put": operation("Make it, or set its quotas", ref(ProjectInfo), name, body=ref(ProjectTerms)),
            "delete": operation("Remove it, if it is empty", ref(ProjectInfo), name),
        },
        "/api/v1/secrets": {"get": operation("All secrets, without their values", listed(SecretInfo))},
        "/api/v1/secrets/{project}/{name}": {
            "put": operation("Set it", ref(SecretInfo), project, name, body=ref(SecretValue)),
            "delete": operation(
                "Remove it, unless a function uses it", ref(SecretInfo), project, name, in_query("force", "integer")
            ),
        },
        "/api/v1/secrets/rekey": {"post": operation("Encrypt all with another master key", ref(Rekeyed))},
        "/api/v1/audit": {
            "get": operation(
                "Who changed what, newest first",
                listed(AuditEvent),
                in_query("by"),
                in_query("since_unix_ms", "integer"),
                in_query("limit", "integer"),
            )
        },
    }
