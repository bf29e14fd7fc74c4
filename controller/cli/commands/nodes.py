"""`fs nodes`: the nodes, with memory, weights and workers."""

from __future__ import annotations

import time
from pathlib import Path

import click

from fleetstart.runtime.contract.errors import Forbidden, NotFound

from ...schemas.functions import NodesStatus
from ...schemas.nodes import NodeCertificate
from .. import output
from ..api_client import ApiClient, find_server
from ..root import verb
from ..units import format_utc
from .status import node_lines


@click.command
@click.argument("node", required=False)
@verb()
@click.pass_obj
def command(home: Path, *, node: str | None, url: str | None, as_json: bool) -> None:
    """Show the nodes that are alive: memory, isolation, weights in memory and on disk, workers."""
    with ApiClient(find_server(url, home)) as server:
        status = server.get("/api/v1/status", NodesStatus, functions="summary")
    if status.limited:
        raise Forbidden(
            "this key is limited to some functions, and nodes are shared by all",
            hint="use a key that was made without --function and --project",
        )
    nodes = [report for report in status.nodes if node in (None, report.node)]
    if node is not None and not nodes:
        alive = ", ".join(report.node for report in status.nodes) or "none"
        raise NotFound(f"node {node[:80]} is not alive", hint=f"these are: {alive}")
    workers = [worker for info in status.functions for worker in info.workers]
    if as_json:
        output.json_data(nodes)
        return
    if not nodes:
        output.message("no node is registered: nothing can run")
    for report in nodes:
        output.data(node_lines(report, status.copies))
        if certificate := next((one for one in status.certificates if one.node == report.node), None):
            output.data(f"         certificate {certificate_text(certificate, time.time())}")
        if report.node in status.draining:
            output.data("         draining: it gets no workers (fs node drain --undo)")
        for worker in workers:
            if worker.node == report.node:
                output.data(f"         worker  {worker.worker}   {worker.function}@{worker.version}   {worker.state}")


def certificate_text(certificate: NodeCertificate, now_s: float) -> str:
    """A node's certificate in words: its key, and how long it is good."""
    until = format_utc(certificate.expires_unix_ms)
    good = f"until {until}, renewed by itself" if certificate.expires_unix_ms > now_s * 1000 else f"expired {until}"
    return f"{good}   key {certificate.key_sha256[:16]}   joined {format_utc(certificate.joined_unix_ms)}"
