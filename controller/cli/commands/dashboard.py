"""`fs dashboard`: prints the dashboard's URL, or opens it."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from ...auth.owner_key_file import write_key_file
from ...schemas.functions import SystemStatus
from .. import output
from ..api_client import ApiClient, find_server
from ..home import HomeLayout
from ..root import verb


@click.command
@click.option("--open", "opens", is_flag=True, help="Also open it in the browser.")
@verb()
@click.pass_obj
def command(home: Path, *, opens: bool, url: str | None, as_json: bool) -> None:
    """Print the URL of the dashboard: functions, invocations as waterfalls, nodes and usage, live.

    The URL contains the key, if there is one, after the #: browsers do not send that part, and the page removes it from
    their history. Do not share it.
    """
    address = find_server(url, home)
    with ApiClient(address) as server:
        server.get("/api/v1/status", SystemStatus, functions="none")  # a server that does not answer has no pages
    page = f"{address.url}/ui/" + (f"#key={address.key}" if address.key else "")
    if as_json:
        output.json_data({"url": page})
    else:
        output.data(page)
    if opens and not _shown(page, HomeLayout(home)):
        output.message("no browser found: open the URL yourself")


def _shown(page: str, layout: HomeLayout) -> bool:
    """Opens the page through a file that only this user can read: others can read the arguments of programs."""
    import webbrowser

    layout.home.mkdir(parents=True, exist_ok=True, mode=0o700)
    script = msgspec.json.encode(page).decode()
    write_key_file(
        layout.dashboard_page, f"<!doctype html><title>fleetstart</title><script>location.replace({script})</script>"
    )
    return webbrowser.open(layout.dashboard_page.as_uri())
