"""`fs price`: price sheets, each with the moment from which it applies."""

from __future__ import annotations

import time
from pathlib import Path

import click

from fleetstart.runtime.contract.billing.ledger import dollars
from fleetstart.runtime.contract.billing.prices import PriceSheet
from fleetstart.runtime.contract.node.devices import canonical_type

from ...schemas.functions import NewPrices
from .. import output
from ..api_client import ApiClient, find_server
from ..command_group import CommandGroup
from ..root import verb
from ..units import format_utc, parse_nano_dollars, parse_unix_ms


@click.group(cls=CommandGroup, context_settings={"max_content_width": 100})
def command() -> None:
    """Rates in dollars for a GiB of a worker's memory and a second. A new rate never changes past costs.

    Each command has --json.
    """


@command.command
@verb()
@click.pass_obj
def ls(home: Path, *, url: str | None, as_json: bool) -> None:
    """List the price sheets, each with the moment from which it applies."""
    with ApiClient(find_server(url, home)) as server:
        sheets = server.get("/api/v1/prices", list[PriceSheet])
    if as_json:
        output.json_data(sheets)
    else:
        output.data(table(sheets))


@command.command("set")
@click.option("--execute", required=True, metavar="USD", help="While calls run.")
@click.option("--idle", required=True, metavar="USD", help="Idle time of workers that are kept because of `min`.")
@click.option(
    "--device", "devices", multiple=True, metavar="TYPE=USD", help="GiB of device memory, as H100=0.00001; repeatable."
)
@click.option("--from", "begins", metavar="DATE", help="UTC unless it has another zone; default: as soon as possible.")
@verb()
@click.pass_obj
def set_(
    home: Path,
    *,
    execute: str,
    idle: str,
    devices: tuple[str, ...],
    begins: str | None,
    url: str | None,
    as_json: bool,
) -> None:
    """Set rates from a later moment on, at least a minute ahead. Devices that are not named keep their rates."""
    new = NewPrices(
        from_unix_ms=parse_unix_ms(begins, now_s=time.time(), option="--from") if begins else None,
        execute_nusd_per_gib_s=parse_nano_dollars(execute, option="--execute"),
        idle_nusd_per_gib_s=parse_nano_dollars(idle, option="--idle"),
        device_nusd_per_gib_s=_device_rates(devices),
    )
    with ApiClient(find_server(url, home)) as server:
        sheet = server.post("/api/v1/prices", new, PriceSheet)
    if as_json:
        output.json_data(sheet)
    else:
        output.data(table([sheet]))


def _device_rates(given: tuple[str, ...]) -> dict[str, int]:
    rates: dict[str, int] = {}
    for pair in given:
        name, equals, usd = pair.partition("=")
        if not name or not equals:
            raise click.UsageError(f"--device {pair[:80]!r} is not TYPE=USD")
        rates[canonical_type(name)] = parse_nano_dollars(usd, option="--device")
    return rates


def table(sheets: list[PriceSheet]) -> str:
    rows = [
        (
            str(sheet.version),
            format_utc(sheet.from_unix_ms) if sheet.from_unix_ms else "the beginning",
            dollars(sheet.execute_nusd_per_gib_s),
            dollars(sheet.idle_nusd_per_gib_s),
            ", ".join(f"{name} {dollars(rate)}" for name, rate in sorted(sheet.device_nusd_per_gib_s.items())),
        )
        for sheet in sheets
    ]
    return output.table(
        ("SHEET", "FROM", "EXECUTE $/GiB-s", "IDLE $/GiB-s", "DEVICES $/GiB-s"), rows, right=frozenset({0, 2, 3})
    )
