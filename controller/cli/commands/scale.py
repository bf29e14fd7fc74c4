"""`fs scale`: changes the number of workers without a deploy."""

from __future__ import annotations

import math
from pathlib import Path

import click
import msgspec

from fleetstart.runtime.contract.function.spec import Limits, Scale

from ...schemas.functions import FunctionInfo, Traffic
from ...state.records import ScaleOverride
from .. import output
from ..api_client import ApiClient, find_server, function_path, suggest_function
from ..completions import function_names
from ..root import verb


@click.command
@click.argument("name", shell_complete=function_names)
@click.option(
    "--min", "min_workers", type=click.IntRange(0), help="Workers that run even without calls, and are billed."
)
@click.option("--max", "max_workers", type=click.IntRange(1), help="Largest number of workers.")
@click.option("--keep-alive", "keep_alive_s", type=float, metavar="SECONDS", help="How long an idle worker stays.")
@click.option("--rate", type=click.FloatRange(0), metavar="PER_SECOND", help="Calls a second; 0: no limit.")
@click.option("--burst", type=click.IntRange(0), help="Calls that may arrive at once after a pause.")
@click.option("--concurrent", type=click.IntRange(0), help="Calls that may run at a time; 0: no limit.")
@click.option("--reset", is_flag=True, help="Return to the settings of its versions.")
@verb()
@click.pass_obj
def command(
    home: Path,
    *,
    name: str,
    min_workers: int | None,
    max_workers: int | None,
    keep_alive_s: float | None,
    rate: float | None,
    burst: int | None,
    concurrent: int | None,
    reset: bool,
    url: str | None,
    as_json: bool,
) -> None:
    """Show how a function scales, or change it at once, until another version is live."""
    for option, value in (("--keep-alive", keep_alive_s), ("--rate", rate)):
        if value is not None and not math.isfinite(value):  # JSON has none, and it would be sent as nothing
            raise click.BadParameter(f"{value} is no number of anything", param_hint=option)
    change = ScaleOverride(
        min=min_workers,
        max=max_workers,
        keep_alive_s=keep_alive_s,
        rate=rate,
        burst=burst,
        concurrent=concurrent,
    )
    if reset and change != ScaleOverride():
        raise click.UsageError("--reset resets everything; give it alone")
    path = function_path(name)
    with ApiClient(find_server(url, home)) as server, suggest_function(server, name):
        if reset or change != ScaleOverride():
            server.send_once("PUT", f"{path}/scale", None if reset else change, Traffic)
        info = server.get(path, FunctionInfo)
    if as_json:
        output.json_data({**msgspec.to_builtins(info.scale), **msgspec.to_builtins(info.limits)})
    else:
        output.data(describe_scale(info.scale, info.limits))


def describe_scale(scale: Scale, limits: Limits) -> str:
    text = f"min {scale.min}, max {scale.max}, keep-alive {scale.keep_alive_s:g} s"
    if scale.standby_s:
        text += f", then standby for {scale.standby_s:g} s"
    if limits.rate:
        burst = f" (at once: {limits.burst})" if limits.burst else ""
        text += f", {limits.rate:g} calls a second at most{burst}"
    if limits.concurrent:
        text += f", {limits.concurrent} calls at a time at most"
    return text
