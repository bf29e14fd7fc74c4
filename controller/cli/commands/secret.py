"""`fs secret`: secrets for the environments of workers."""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.parse import quote

import click

from fleetstart.runtime.contract.errors import InvalidInput, NotFound

from ...schemas.access import Rekeyed, SecretInfo, SecretValue
from .. import output
from ..api_client import ApiClient, find_server
from ..command_group import CommandGroup
from ..root import verb
from ..units import format_utc

READ_MAX_BYTES = 64 * 1024
DEFAULT = "default"


@click.group(cls=CommandGroup, context_settings={"max_content_width": 100})
def command() -> None:
    """Secrets of a project: encrypted at rest, environment variables of workers whose function names them
    (`@function(secrets=["HF_TOKEN"])`), and *** in logs and errors. Each command has --json."""


@command.command("set")
@click.argument("name")
@click.option(
    "--from-file",
    type=click.Path(),
    metavar="FILE|-",
    help="File with the value; -: stdin, the default without a terminal.",
)
@click.option(
    "--project", default=DEFAULT, show_default=True, metavar="NAME", help="Project whose functions may use it."
)
@verb()
@click.pass_obj
def set_(home: Path, *, name: str, from_file: str | None, project: str, url: str | None, as_json: bool) -> None:
    """Set a secret. Prompts for the value, since other users can read arguments. One newline at its end is removed.

    \b
    fs secret set HF_TOKEN
    pass show hf | fs secret set HF_TOKEN --from-file -
    fs secret set TLS_KEY --from-file key.pem --project ml
    """
    value = SecretValue(_value(name, from_file))
    with ApiClient(find_server(url, home)) as server:
        info = server.put(_path(project, name), value, SecretInfo)
    if as_json:
        output.json_data(info)
        return
    output.data(table([info]))
    if info.running:
        output.message(
            f"{info.running} running workers of {', '.join(info.used_by)} keep the value that they started with; "
            "those that start from now on have the new one"
        )


@command.command
@verb()
@click.pass_obj
def ls(home: Path, *, url: str | None, as_json: bool) -> None:
    """List secrets by name, and which functions use them. Values are never shown."""
    with ApiClient(find_server(url, home)) as server:
        secrets = server.get("/api/v1/secrets", list[SecretInfo])
    if as_json:
        output.json_data(secrets)
    elif secrets:
        output.data(table(secrets))
    else:
        output.message("there are no secrets: fs secret set NAME")


@command.command
@click.argument("name")
@click.option("--project", default=DEFAULT, show_default=True, metavar="NAME")
@click.option("--force", is_flag=True, help="Also if functions use it: their workers cannot start then.")
@verb()
@click.pass_obj
def rm(home: Path, *, name: str, project: str, force: bool, url: str | None, as_json: bool) -> None:
    """Remove a secret. Running workers keep the value that they started with."""
    with ApiClient(find_server(url, home)) as server:
        info = server.delete(_path(project, name) + ("?force=1" if force else ""), SecretInfo)
    if as_json:
        output.json_data(info)
    else:
        output.message(f"secret {info.name} of project {info.project} is removed")


@command.command
@verb()
@click.pass_obj
def rekey(home: Path, *, url: str | None, as_json: bool) -> None:
    """Encrypt all secrets with a new master key, and drop the old one.

    The key is in the controller's FS_HOME or in its FS_MASTER_KEY. In the second case put a new key before the old one,
    separated by a comma, restart the controller, run this command, and remove the old key.
    """
    with ApiClient(find_server(url, home)) as server:
        done = server.send_once("POST", "/api/v1/secrets/rekey", {}, Rekeyed)
    if as_json:
        output.json_data(done)
    else:
        output.message(f"{done.secrets} secrets are encrypted with master key {done.master}")


def table(secrets: list[SecretInfo]) -> str:
    rows = [
        (one.name, one.project, ", ".join(one.used_by), format_utc(one.updated_unix_ms), one.updated_by, one.master)
        for one in secrets
    ]
    return output.table(("SECRET", "PROJECT", "USED BY", "SET", "BY", "MASTER KEY"), rows)


def _path(project: str, name: str) -> str:
    return f"/api/v1/secrets/{quote(project, safe='')}/{quote(name, safe='')}"


def _value(name: str, from_file: str | None) -> str:
    if from_file is None and sys.stdin.isatty():
        return str(click.prompt(name, hide_input=True, err=True))
    try:
        if from_file in (None, "-"):
            data = sys.stdin.buffer.read(READ_MAX_BYTES)
        else:
            with open(str(from_file), "rb") as file:
                data = file.read(READ_MAX_BYTES)
    except OSError as error:
        raise NotFound(f"{from_file} cannot be read: {error.strerror}") from error
    try:
        return data.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"secret {name} is not text, which an environment variable is", hint="encode it, with base64 for example"
        ) from error
