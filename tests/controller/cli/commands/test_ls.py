"""`fs ls`: the table of functions, and the lines below it."""

from __future__ import annotations

from fleetstart.controller.cli.commands.ls import functions_table
from fleetstart.controller.schemas.functions import FunctionInfo
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import BundleId, FunctionName, Version


def info(name: str, *, async_calls: int) -> FunctionInfo:
    spec = FunctionSpec(name=FunctionName(name), bundle=BundleId("b"), entry="a:b")
    return FunctionInfo(
        name=spec.name, version=Version(1), url="", spec=spec, deployed_unix_ms=0, workers=[], queued=0, running=1,
        async_calls=async_calls,
    )  # fmt: skip


def test_a_backlog_of_async_calls_is_seen() -> None:
    """Of 10,000 calls that waited the table had none: gateways take up as many as workers can run."""
    table = functions_table([info("busy", async_calls=9_932), info("one", async_calls=1)], now_s=1.0)
    assert table.splitlines()[3:] == ["busy: 9,932 async calls wait or run"]
