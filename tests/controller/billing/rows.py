"""Rows for tests."""

from __future__ import annotations

from fleetstart.runtime.contract.billing.ledger import InvocationRow, PhaseRow, WorkerPhase
from fleetstart.runtime.contract.ids import FunctionName, InvocationId, NodeId, Version, WorkerId

ROW_BYTES = 1536
"""Memory of a decoded row of the ledger, with its bytes: a test measures that it is less, and the soak allows it."""


def call(
    name: str,
    *,
    cost: int = 0,
    at: int = 1000,
    function: str = "f",
    version: int = 1,
    tags: dict[str, str] | None = None,
) -> InvocationRow:
    return InvocationRow(
        id=InvocationId(name),
        function=FunctionName(function),
        version=Version(version),
        status=200,
        accepted_unix_ms=at,
        queue_ms=1,
        billed_ms=cost,
        memory_bytes=1 << 30,
        rate_nusd_per_gib_s=1000,
        cost_nusd=cost,
        tags=tags or {},
    )


def phase(
    name: str,
    *,
    cost: int = 0,
    at: int = 1000,
    function: str = "f",
    of: WorkerPhase = "idle",
    tags: dict[str, str] | None = None,
) -> PhaseRow:
    return PhaseRow(
        id=name,
        worker=WorkerId("w"),
        node=NodeId("n"),
        function=FunctionName(function),
        version=Version(1),
        phase=of,
        started_unix_ms=at,
        duration_ms=5,
        memory_bytes=1 << 30,
        rate_nusd_per_gib_s=1 if cost else 0,
        cost_nusd=cost,
        tags=tags or {},
    )
