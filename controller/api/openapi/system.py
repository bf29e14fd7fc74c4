"""The system as a whole, and the objects and checkpoints that it keeps."""

from __future__ import annotations

from typing import Any

import msgspec

from fleetstart.runtime.contract.weights.manifest import Manifest

from ...observability.activity import Activity
from ...schemas.functions import CheckpointInfo, SystemStatus
from .operation import in_header, in_path, in_query, listed, operation, ref

STRUCTS: tuple[type[msgspec.Struct], ...] = (SystemStatus, Activity, CheckpointInfo, Manifest)


def paths() -> dict[str, Any]:
    key, checkpoint = in_path("key"), in_path("id")
    return {
        "/healthz": {"get": operation("Whether this process serves; wakes and bills nothing", {"type": "object"})},
        "/api/v1/status": {"get": operation("The whole system", ref(SystemStatus))},
        "/api/v1/activity": {"get": operation("The last minutes, by function", ref(Activity))},
        "/api/v1/objects/{key}": {
            "head": operation("Whether an object is in the store", None, key),
            "get": operation(
                "An object, or one range of it",
                {"type": "string", "format": "binary"},
                key,
                in_header("range"),
                media="application/octet-stream",
            ),
            "put": operation("Upload a bundle or a checkpoint's object", {"type": "object"}, key, status="201"),
        },
        "/api/v1/checkpoints": {
            "get": operation("All checkpoints, newest first", listed(CheckpointInfo), in_query("unfinished", "integer"))
        },
        "/api/v1/checkpoints/{id}": {
            "get": operation("Its manifest", ref(Manifest), checkpoint),
            "delete": operation(
                "Remove it, unless a version of a deployed function uses it", ref(CheckpointInfo), checkpoint
            ),
        },
    }
