"""Identifiers as distinct types, so that a node id cannot pass for a worker id, and their generators."""

from __future__ import annotations

import secrets
from typing import NewType

FunctionName = NewType("FunctionName", str)
Version = NewType("Version", int)
WorkerId = NewType("WorkerId", str)
NodeId = NewType("NodeId", str)
PipelineId = NewType("PipelineId", str)
InvocationId = NewType("InvocationId", str)
CheckpointId = NewType("CheckpointId", str)
"""sha256 (hex) of a manifest's bytes."""
BundleId = NewType("BundleId", str)
"""sha256 (hex) of a bundle's tar bytes."""
LayerId = NewType("LayerId", str)
"""sha256 (hex) of a layer's manifest."""
PartId = NewType("PartId", str)
"""sha256 (hex) of the bytes of a part that volumes share."""


def new_worker_id() -> WorkerId:
    return WorkerId("w-" + secrets.token_hex(6))


def new_pipeline_id() -> PipelineId:
    return PipelineId("p-" + secrets.token_hex(6))


def new_invocation_id() -> InvocationId:
    return InvocationId("inv-" + secrets.token_hex(10))


LIVE = "live"
"""The alias that every function has; `@live` is the default where no version is named."""
