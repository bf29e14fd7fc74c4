"""`fs budget`: limits on what functions cost in a day or a month."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, cast

import click

from fleetstart.runtime.contract.billing.ledger import dollars

from ...schemas.functions import BudgetInfo, BudgetTerms
from .. import output
from ..api_client import ApiClient, find_server, object_path, suggest_function
from ..command_group import CommandGroup
from ..completions import function_names
from ..root import verb
from ..units import format_utc, parse_nano_dollars


@click.group(cls=CommandGroup, context_settings={"max_content_width": 100})
def command() -> None:
    """Budgets of functions. When one is spent, calls are rejected with 402 until it renews. Each command has --json."""


@command.command("set")
@click.argument("name", shell_complete=function_names)
@click.option("--usd", required=True, metavar="AMOUNT", help="5, 0.25, or as little as 0.000000001.")
@click.option("--per", type=click.Choice(["day", "month"]), required=True, help="Calendar period, UTC.")
@click.option("--alert", type=click.IntRange(1, 100), default=80, show_default=True, metavar="PERCENT")
@verb()
@click.pass_obj
def set_(home: Path, *, name: str, usd: str, per: str, alert: int, url: str | None, as_json: bool) -> None:
    """Set a function's budget, replacing the one it has.

    Costs of the period so far count. Calls that run when the budget is spent are completed and billed.
    """
    terms = BudgetTerms(
        limit_nusd=parse_nano_dollars(usd, option="--usd"), per=cast(Literal["day", "month"], per), alert_percent=alert
    )
    with ApiClient(find_server(url, home)) as server, suggest_function(server, name):
        info = server.put(object_path("budgets", name), terms, BudgetInfo)
    _show(info, as_json=as_json)


@command.command
@verb()
@click.pass_obj
def ls(home: Path, *, url: str | None, as_json: bool) -> None:
    """List budgets, and how much of each is spent."""
    with ApiClient(find_server(url, home)) as server:
        budgets = server.get("/api/v1/budgets", list[BudgetInfo])
    if as_json:
        output.json_data(budgets)
    elif budgets:
        output.data(table(budgets))
    else:
        output.message("no function has a budget")


@command.command
@click.argument("name", shell_complete=function_names)
@verb()
@click.pass_obj
def rm(home: Path, *, name: str, url: str | None, as_json: bool) -> None:
    """Remove a function's budget: its cost is then unlimited."""
    with ApiClient(find_server(url, home)) as server, suggest_function(server, name):
        info = server.delete(object_path("budgets", name), BudgetInfo)
    if as_json:
        output.json_data(info)
    else:
        output.message(f"{info.function} has no budget now; ${dollars(info.spent_nusd)} of {_limit(info)} were spent")


def table(budgets: list[BudgetInfo]) -> str:
    rows = [
        (
            info.function,
            _limit(info),
            f"${dollars(info.spent_nusd)}",
            f"{100 * info.spent_nusd // info.limit_nusd}%",
            info.stage if info.stage != "alert" else f"over {info.alert_percent}%",
            format_utc(info.renews_unix_ms),
        )
        for info in budgets
    ]
    return output.table(("FUNCTION", "BUDGET", "SPENT", "", "STATE", "RENEWS"), rows, right=frozenset({1, 2, 3}))


def _limit(info: BudgetInfo) -> str:
    return f"${dollars(info.limit_nusd).rstrip('0').rstrip('.')} a {info.per}"


def _show(info: BudgetInfo, *, as_json: bool) -> None:
    if as_json:
        output.json_data(info)
    else:
        output.data(table([info]))
