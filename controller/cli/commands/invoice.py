"""`fs invoice`: sums of a month's ledger rows by function, version, phase and price."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click

from fleetstart.runtime.contract.billing.ledger import dollars

from ...schemas.functions import Invoice, InvoiceLine
from .. import output
from ..api_client import ApiClient, find_server, object_path, require_function
from ..root import verb


@click.command
@click.argument("month", required=False)
@click.option("--function", "name", metavar="NAME", help="Only of this function.")
@click.option("--csv", "as_csv", is_flag=True, help="Comma-separated values; money in nano-dollars and in dollars.")
@verb()
@click.pass_obj
def command(home: Path, *, month: str | None, name: str | None, as_csv: bool, url: str | None, as_json: bool) -> None:
    """Show the invoice of a MONTH such as 2026-11 (UTC), or of this month so far, line by line.

    It is the sum of the ledger's rows, to the last nano-dollar. A row counts to the month in which it was booked, so
    the invoice of a past month never changes.
    """
    month = month or datetime.now(UTC).strftime("%Y-%m")
    query: dict[str, str | int] = {"function": name} if name else {}
    with ApiClient(find_server(url, home), timeout_s=300.0) as server:
        invoice = server.get(object_path("invoices", month), Invoice, **query)
        if name and not invoice.lines:
            require_function(server, name)
    if as_json:
        output.json_data(invoice)
    elif as_csv:
        headings = ("function", "version", "phase", "price", "rate_nusd_per_gib_s")
        counts = ("rows", "duration_ms", "cost_nusd", "cost_usd")
        devices = ("device_type", "device_rate_nusd_per_gib_s", "device_gib_ms")
        output.data(output.csv((*headings, *counts, *devices), [_csv_row(line) for line in invoice.lines]))
    else:
        output.data(render_invoice(invoice))


def _device(line: InvoiceLine) -> tuple[str, ...]:
    if not line.device_type:
        return ("", "", "")
    rate = dollars(line.device_rate_nusd_per_gib_s) if line.device_rate_nusd_per_gib_s else ""
    return (line.device_type, f"{line.device_gib_ms / 1000:.3f}", rate)


def render_invoice(invoice: Invoice) -> str:
    devices = any(line.device_type for line in invoice.lines)
    rows = [
        (
            line.function,
            str(line.version),
            line.kind,
            str(line.price),
            _rate(line),
            str(line.rows),
            f"{line.duration_ms / 1000:.3f}",
            *(_device(line) if devices else ()),
            _cost(line),
        )
        for line in invoice.lines
    ]
    headings = ("FUNCTION", "VERSION", "PHASE", "PRICES", "$/GiB-s", "ROWS", "SECONDS")
    of_devices = ("DEVICE", "GiB-s", "$/GiB-s") if devices else ()
    blank = ("",) * len(of_devices)
    total = ("total", "", "", "", "", str(invoice.rows), "", *blank, f"${dollars(invoice.total_nusd)}")
    title = f"invoice of {invoice.month}" + ("" if invoice.complete else ", so far")
    numbers = {1, 3, 4, 5, 6, *({8, 9, 10} if devices else {7})}
    text = f"{title}\n\n" + output.table((*headings, *of_devices, "COST"), [*rows, total], right=frozenset(numbers))
    if invoice.segments:
        segments = "segment" if invoice.segments == 1 else "segments"
        text += f"\n\nledger: {invoice.segments} {segments} so far, checksum of the last {invoice.checksum[:16]}…"
    return text


def _rate(line: InvoiceLine) -> str:
    return dollars(line.rate_nusd_per_gib_s) if line.rate_nusd_per_gib_s else ""


def _cost(line: InvoiceLine) -> str:
    if line.rate_nusd_per_gib_s or line.cost_nusd:
        return f"${dollars(line.cost_nusd)}"
    return "see invocation" if line.kind == "execute" else "waived"


def _csv_row(line: InvoiceLine) -> list[str]:
    numbers = (line.price, line.rate_nusd_per_gib_s, line.rows, line.duration_ms, line.cost_nusd)
    devices = (line.device_type, str(line.device_rate_nusd_per_gib_s), str(line.device_gib_ms))
    return [line.function, str(line.version), line.kind, *map(str, numbers), dollars(line.cost_nusd), *devices]
