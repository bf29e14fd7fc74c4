"""`fs status`: the server, its nodes, budgets that are nearly spent, and its functions."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import click

from fleetstart.runtime.contract.billing.ledger import dollars
from fleetstart.runtime.contract.node.devices import DeviceReport
from fleetstart.runtime.contract.node.reports import ISOLATION_ADVICE, NodeReport

from ...schemas.functions import BudgetInfo, RedisMemory, SystemStatus
from ...schemas.nodes import CopyInfo
from .. import output
from ..api_client import ApiClient, find_server
from ..curl_hint import access_line
from ..root import verb
from ..units import format_utc
from .ls import functions_table

FAMILIES_SHOWN = 3


@click.command
@verb()
@click.pass_obj
def command(home: Path, *, url: str | None, as_json: bool) -> None:
    """Show the server, its nodes and its functions.

    The server writes to Redis and to the store, reads back and deletes: what does not work is named.
    """
    address = find_server(url, home)
    with ApiClient(address) as server:
        status = server.get("/api/v1/status", SystemStatus, probe=1)
    if as_json:
        output.json_data(status)
        return
    output.data(
        f"server   {status.url}   fleetstart {status.version}   Redis {status.redis}   store {status.store or '–'}"
    )
    if status.redis_memory is not None:
        output.data(_redis_memory(status.redis_memory))
    for problem in status.redis_problems:
        output.data(f"redis    {problem}")
    if status.store_problem:
        output.data(f"store    {status.store_problem}")
    output.data(f"access   {access_line(status.access, address)}")
    for node in status.nodes:
        output.data(node_lines(node, status.copies))
    if not status.nodes and not status.limited:
        output.data("no node is registered: nothing can run")
    for budget in status.budgets:
        if budget.stage != "ok":
            output.data(_budget(budget))
    for record in status.unreadable:
        output.data(f"skipped  {record.kind} {record.name}   cannot be read by this release: {record.error}")
    if status.functions:
        output.data("\n" + functions_table(status.functions, now_s=time.time()))


def _redis_memory(memory: RedisMemory) -> str:
    line = f"redis    memory {output.format_size(memory.used_bytes)} of {output.format_size(memory.limit_bytes)}"
    largest = sorted(memory.families.items(), key=lambda one: -one[1])[:FAMILIES_SHOWN]
    parts = ", ".join(f"{name} {output.format_size(size)}" for name, size in largest if size)
    return line + (f"   {parts}" if parts else "")


def _budget(budget: BudgetInfo) -> str:
    share = f"{100 * budget.spent_nusd // budget.limit_nusd}% of ${dollars(budget.limit_nusd)} for {budget.period}"
    ending = ": calls are rejected" if budget.stage == "spent" else ""
    return f"budget   {budget.function}   {share} is spent{ending}, it renews {format_utc(budget.renews_unix_ms)}"


def node_lines(node: NodeReport, copies: Iterable[CopyInfo] = ()) -> str:
    used = f"{output.format_size(node.memory_used_bytes)} of {output.format_size(node.memory_bytes)}"
    where = f"   region {node.region}" if node.region else ""
    line = f"node     {node.node}{where}   {node.cpus} cores   memory {used}"
    line += f"\n         isolation {isolation_text(node)}   limits {node.limits or 'none'}"
    line += f"   warm fork servers: {', '.join(node.profiles) or 'none yet'}"
    if node.peer_transports:
        line += f"   others read from it over {' or '.join(node.peer_transports)}"
    if node.isolation_refused:
        line += f"\n         the kernel refused: {node.isolation_refused}"
    if node.confines == "none":
        line += f"\n         it takes no functions but those with gvisor or in containers: {ISOLATION_ADVICE}"
    for device in node.devices:
        line += f"\n         {device_text(device)}"
    line += f"\n         {_weights(node)}"
    if node.layers or node.preloaded_bytes:
        line += f"\n         packages: {len(node.layers)} layers on disk, {output.format_size(node.preloaded_bytes)} "
        line += "imported ahead of calls"
    kept = {copy.checkpoint for copy in copies if copy.node == node.node}
    for segment in node.segments:
        share = f"{segment.ready_bytes / segment.size_bytes:.0%}" if segment.size_bytes else "empty"
        line += f"\n         weights {segment.checkpoint[:12]}   {output.format_size(segment.size_bytes)}   "
        line += segment.state if segment.state != "filling" else f"filling, {share}"
        line += "   a kept copy" if segment.checkpoint in kept else ""
    for checkpoint in sorted(kept - {segment.checkpoint for segment in node.segments}):
        line += f"\n         weights {checkpoint[:12]}   to be fetched   a kept copy"
    return line


def device_text(device: DeviceReport) -> str:
    """A device in one line: type, memory, cores or links, and the rates of its loads and of decoding, once they are
    known."""
    line = f"device  {device.id}   {device.type}   reserved {output.format_size(device.reserved_bytes)} of "
    line += output.format_size(device.memory_bytes)
    if device.cores:
        line += f"   cores {','.join(map(str, device.cores))}"
    if device.links:
        line += f"   NVLink to {', '.join(device.links)}"
    if device.pcie_bytes_per_s:
        line += f"   PCIe {device.pcie_bytes_per_s / 1e9:.0f} GB/s"
    if device.load_bytes_per_s:
        line += f"   loads {device.load_bytes_per_s / 1e9:.1f} GB/s"
    if device.decode_bytes_per_s:
        line += f"   decodes {device.decode_bytes_per_s / 1e9:.1f} GB/s"
    return line


def isolation_text(node: NodeReport) -> str:
    """What a node's workers are confined in: "mnt,pid,ipc,uts,net", or what stands in its place; and its
    sandboxes."""
    text = node.isolation or ("refused" if node.confines == "none" else "not known yet")
    if node.confines == "plain":
        text = "none (plain processes, as FS_ISOLATION=best-effort allows)"
    return f"{text}, besides: {' and '.join(node.isolations)}" if node.isolations else text


def _weights(node: NodeReport) -> str:
    """Memory and disk that weights use on a node."""
    memory = node.weights_memory
    line = f"weights memory {output.format_size(memory.used_bytes)} used, {output.format_size(memory.free_bytes)} ready"
    line += f", {'4 KiB' if memory.pages == 'small' else '2 MiB'} pages ({memory.pages})"
    return line + (f"   on disk {output.format_size(node.disk_bytes)}" if node.disk_bytes else "")
