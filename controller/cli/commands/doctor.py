"""`fs doctor`: checks of this machine, one a line, the speeds that limit weight loads, and advice."""

from __future__ import annotations

import os
from pathlib import Path

import click

from fleetstart.runtime.contract.store_url import parse_store

from .. import output
from ..doctor import block_profile, throughput
from ..doctor.checks import run_checks
from ..root import verb

MARKS = {"ok": ("ok", "green"), "warn": ("!!", "yellow"), "bad": ("no", "red")}


@click.command
@click.option("--port", default=7433, show_default=True, type=click.IntRange(1, 65535), help="Port to check.")
@click.option("--store", default="", metavar="PATH|s3://…", help="Store to try and measure; default: the server's.")
@click.option("--measure/--no-measure", default=True, help="Measure disk, memory, store and GPU: a few seconds.")
@click.option("--profile", is_flag=True, help="Measure also what a block of a multicast costs.")
@click.option("--measure-bytes", default=0, hidden=True, type=click.IntRange(0))
@verb(server=False)
@click.pass_obj
def command(
    home: Path, *, port: int, store: str, measure: bool, profile: bool, measure_bytes: int, as_json: bool
) -> int:
    """Check this machine, and advise on what is missing or slow. Exit code 1 if something cannot work."""
    if store and isinstance(where := parse_store(store), Path):
        store = str(where.expanduser().absolute())
    findings = run_checks(
        home,
        port,
        store,
        best_effort=os.environ.get("FS_ISOLATION") == "best-effort",
        engine=os.environ.get("FS_CONTAINER_ENGINE") or "",
        redis=os.environ.get("FS_REDIS_URL") or "",
    )
    if measure:
        output.message("measuring disk, memory and store for a few seconds; without: --no-measure")
        findings += throughput.check_throughput(home, store or throughput.store_location(home), measure_bytes)
    if profile:
        findings.append(block_profile.check_blocks())
    if as_json:
        output.json_data(findings)
    else:
        width = max(len(finding.check) for finding in findings)
        for finding in findings:
            mark, colour = MARKS[finding.verdict]
            output.data(f"{click.style(mark, fg=colour)}  {finding.check:<{width}}  {finding.found}")
            if finding.advice:
                output.data(f"    {'':<{width}}  → {finding.advice}")
    return output.FAILED if any(finding.verdict == "bad" for finding in findings) else output.OK
