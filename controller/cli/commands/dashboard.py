"""`fs dashboard`: where the server's pages are."""

from __future__ import annotations

from pathlib import Path

import click

from fleetstart.controller.cli import output
from fleetstart.controller.cli.client import Server, find_server
from fleetstart.controller.cli.root import verb
from fleetstart.controller.resources import SystemStatus


@click.command
@click.option("--open", "opens", is_flag=True, help="Also show it in the browser.")
@verb()
@click.pass_obj
def command(home: Path, *, opens: bool, url: str | None, as_json: bool) -> None:
    """Print the URL of the dashboard: functions, invocations as waterfalls, nodes, usage, all of it live."""
    with Server(find_server(url, home)) as server:
        server.get("/api/v1/status", SystemStatus)  # a server that does not answer has no pages
        page = f"{server.url}/ui/"
    if as_json:
        output.json_data({"url": page})
    else:
        output.data(page)
    if opens:
        import webbrowser

        if not webbrowser.open(page):
            output.say("no browser was found: open the URL yourself")
