"""`fs webhooks`: shows and rotates the signing secret, and repeats deliveries."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import click

from ...schemas.invocations import InvocationInfo, WebhookRotation, WebhookSecret
from ...state.access_records import DEFAULT
from .. import output
from ..api_client import ApiClient, find_server
from ..command_group import CommandGroup
from ..invocation.async_invoke import invocation_path, print_invocation
from ..root import verb
from ..units import format_utc, parse_seconds


@click.group(cls=CommandGroup, context_settings={"max_content_width": 100})
def command() -> None:
    """Webhooks tell a URL of yours that an async call has ended: fs invoke NAME --async --webhook URL.

    They are signed as Standard Webhooks says (HMAC-SHA256 over webhook-id.webhook-timestamp.body), so that any of its
    libraries can verify them with the secret. Each has --json.
    """


@command.command
@click.option("--project", default=DEFAULT, show_default=True, metavar="NAME", help="Whose functions' webhooks.")
@click.option("--rotate", is_flag=True, help="Make another one.")
@click.option(
    "--grace",
    default="24h",
    show_default=True,
    metavar="AGE",
    help="With --rotate: how long the old secret signs beside the new one; 0s ends it at once.",
)
@verb()
@click.pass_obj
def secret(home: Path, *, project: str, rotate: bool, grace: str, url: str | None, as_json: bool) -> None:
    """Print the secret that a project's webhooks are signed with; it is made when it is first asked for.

    After a rotation each delivery has two signatures for a grace period, so that a receiver with either secret takes
    it.

    \b
    fs webhooks secret --rotate                # then change the receivers, within a day
    fs webhooks secret --rotate --grace 0s     # the old one has leaked
    """
    with ApiClient(find_server(url, home)) as server:
        at = f"/api/v1/webhooks/secret?project={quote(project, safe='')}"
        terms = WebhookRotation(grace_s=parse_seconds(grace, option="--grace"))
        found = server.send_once("POST", at, terms, WebhookSecret) if rotate else server.get(at, WebhookSecret)
    if as_json:
        output.json_data(found)
    else:
        output.data(found.secret)
        if found.old_until_unix_ms:
            output.message(f"the one before signs as well until {format_utc(found.old_until_unix_ms)}")


@command.command
@click.argument("invocation")
@verb()
@click.pass_obj
def redeliver(home: Path, *, invocation: str, url: str | None, as_json: bool) -> None:
    """Send the webhook of an invocation again; its webhook-id stays the same."""
    with ApiClient(find_server(url, home)) as server:
        print_invocation(
            server.send_once("POST", f"{invocation_path(invocation)}/redeliver", None, InvocationInfo), as_json=as_json
        )
