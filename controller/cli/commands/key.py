"""`fs key`: API keys. The first one is also stored in FS_HOME for the local `fs`, readable by its owner only."""

from __future__ import annotations

import time
from pathlib import Path
from typing import cast

import click

from ...auth import owner_key_file
from ...schemas.access import KeyCreated, KeyInfo, NewKey, Rotation
from ...state.access_records import RIGHTS, Right
from .. import output
from ..api_client import ApiClient, find_server, object_path
from ..command_group import CommandGroup
from ..home import HomeLayout
from ..root import verb
from ..units import format_utc, parse_seconds


@click.group(cls=CommandGroup, context_settings={"max_content_width": 100})
def command() -> None:
    """API keys, one of which every request needs. `fs up` creates the first, unless given --open. Each command has
    --json."""


@command.command
@click.argument("name")
@click.option(
    "--scope", "scopes", multiple=True, required=True, type=click.Choice(RIGHTS),
    help="What it permits; may be repeated. deploy includes read, admin includes all.",
)  # fmt: skip
@click.option(
    "--function",
    "functions",
    multiple=True,
    metavar="NAME",
    help="Only for this function, NAME or PROJECT.NAME; may be repeated.",
)
@click.option("--project", default="", metavar="NAME", help="Only for functions of this project.")
@click.option("--expires", metavar="AGE", help="Valid for this time: 12h, 90d; default: until it is revoked.")
@verb()
@click.pass_obj
def create(
    home: Path,
    *,
    name: str,
    scopes: tuple[str, ...],
    functions: tuple[str, ...],
    project: str,
    expires: str | None,
    url: str | None,
    as_json: bool,
) -> None:
    """Create a key and print it, this once: only its hash is stored.

    \b
    fs key create ci --scope deploy --scope invoke --project ml --expires 90d
    fs key create app --scope invoke --function chat
    """
    new = NewKey(
        name=name,
        rights=[cast(Right, scope) for scope in scopes],
        functions=list(functions),
        project=project,
        expires_s=parse_seconds(expires, option="--expires") if expires else None,
    )
    address = find_server(url, home)
    with ApiClient(address) as server:
        created = server.send_once("POST", "/api/v1/keys", new, KeyCreated)
    layout = HomeLayout(home)
    kept = _keep(layout, created, address.url) if created.first else None
    _show(created, as_json=as_json)
    if created.warning:
        output.message(created.warning)
    if created.first:
        output.message("it is the first key: every request needs one from now on, except /healthz")
        output.message(f"the local fs reads it from {kept}" if kept else "give it to `fs` as FS_KEY")


@command.command
@verb()
@click.pass_obj
def ls(home: Path, *, url: str | None, as_json: bool) -> None:
    """List keys, also expired and revoked ones, with the time of their last use."""
    with ApiClient(find_server(url, home)) as server:
        keys = server.get("/api/v1/keys", list[KeyInfo])
    if as_json:
        output.json_data(keys)
    elif keys:
        output.data(table(keys, now_s=time.time()))
    else:
        output.message("open: there are no keys, so only programs on this machine may send requests")


@command.command
@click.argument("name")
@click.option("--grace", default="1h", show_default=True, metavar="AGE", help="How long the old text stays valid.")
@verb()
@click.pass_obj
def rotate(home: Path, *, name: str, grace: str, url: str | None, as_json: bool) -> None:
    """Give a key a new text, and print it. The old text stays valid for a grace period."""
    terms = Rotation(grace_s=parse_seconds(grace, option="--grace"))
    address = find_server(url, home)
    with ApiClient(address) as server:
        created = server.send_once("POST", f"{object_path('keys', name)}/rotate", terms, KeyCreated)
    layout = HomeLayout(home)
    if _is_of(layout, created.info):
        output.message(f"kept in {_keep(layout, created, address.url) or layout.key}")
    _show(created, as_json=as_json)
    if created.info.old_until_unix_ms:
        output.message(f"the old one is valid until {format_utc(created.info.old_until_unix_ms)}")


@command.command
@click.argument("name")
@verb()
@click.pass_obj
def revoke(home: Path, *, name: str, url: str | None, as_json: bool) -> None:
    """Revoke a key. Its name stays taken, since bills and audit log contain it.

    The controller that answers rejects it at once; others do when they are notified or read Redis, once a second. One
    that cannot reach Redis goes on with the keys that it knew.

    \b
    fs key revoke app
    """
    with ApiClient(find_server(url, home)) as server:
        info = server.delete(object_path("keys", name), KeyInfo)
    if as_json:
        output.json_data(info)
    else:
        output.data(table([info], now_s=time.time()))


@command.command
@verb(server=False)
@click.pass_obj
def recover(home: Path, *, as_json: bool) -> None:
    """Create another admin key for the system of this FS_HOME, if its key is lost. Needs no key.

    The owner of FS_HOME owns the system: the key is written into its Redis, and stored in FS_HOME. Other keys stay
    valid; `fs key ls` lists them, and `fs key revoke` revokes one that may have leaked.
    """
    from ..local.key_recovery import recover_key  # late: a client for Redis comes with it

    layout = HomeLayout(home)
    name = recover_key(layout, find_server(None, home).url)
    if as_json:
        output.json_data({"name": name, "kept_in": str(layout.key)})
    else:
        output.data(name)
        output.message(f"stored in {layout.key}, from which the local fs reads it")


def table(keys: list[KeyInfo], *, now_s: float) -> str:
    rows = [
        (
            info.name,
            ",".join(info.rights),
            ",".join(info.functions) or (f"project {info.project}" if info.project else "all"),
            info.state,
            format_utc(info.expires_unix_ms) if info.expires_unix_ms else "never",
            output.format_age(max(0.0, now_s - info.used_unix_ms / 1000)) + " ago" if info.used_unix_ms else "never",
            f"fs_{info.id}…",
        )
        for info in keys
    ]
    return output.table(("KEY", "SCOPE", "FUNCTIONS", "STATE", "EXPIRES", "USED", "BEGINS"), rows)


def _show(created: KeyCreated, *, as_json: bool) -> None:
    if as_json:
        output.json_data(created)
    else:
        output.data(created.key)


def _keep(layout: HomeLayout, created: KeyCreated, url: str) -> Path | None:
    """Stores the key for the local `fs`; None if another server created it."""
    try:
        if layout.endpoint.read_text().strip() != url:
            return None
        owner_key_file.write_key_file(layout.key, created.key)
        layout.open.unlink(missing_ok=True)
    except OSError:
        return None
    return layout.key


def _is_of(layout: HomeLayout, info: KeyInfo) -> bool:
    """Checks whether the stored key is this one before its rotation."""
    return bool(info.previous_id) and owner_key_file.read_key_file(layout.key).startswith(f"fs_{info.previous_id}_")
