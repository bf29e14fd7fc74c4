"""`fs node`: a second machine joins as a node; nodes are drained and removed."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import click
import msgspec

from fleetstart.runtime.contract.errors import InvalidInput, StartFailed
from fleetstart.runtime.contract.function.setting_checks import check_region
from fleetstart.runtime.contract.identity import FILE, Identity, write_identity
from fleetstart.runtime.contract.process.redis_url import with_ca
from fleetstart.runtime.contract.sizes import parse_size

from ...schemas.access import KeyCreated, NewKey
from ...schemas.nodes import JoinTerms, NodeInfo, NodeJoin
from .. import output
from ..api_client import ApiClient, find_server, object_path
from ..command_group import CommandGroup
from ..home import HomeLayout, clean_if_free, is_locked
from ..local.backends import require_backends
from ..local.join import (
    JoinRecord,
    check_store,
    end_drain,
    own_address,
    read_join,
    wait_joined,
    write_join,
    write_redis_ca,
)
from ..root import verb
from ..units import format_utc, parse_seconds
from .down import stop_supervisor
from .nodes import command as nodes_command
from .up import warn_of_isolation

SUPERVISOR = (sys.executable, "-P", "-m", "fleetstart.controller.cli.local.supervisor")


@click.group(cls=CommandGroup, context_settings={"max_content_width": 100})
def command() -> None:
    """Nodes: let another machine join, drain and remove it. Each command has --json."""


command.add_command(nodes_command, "ls")


@command.command
@click.option("--expires", default="1h", show_default=True, metavar="AGE", help="Valid for this time: 10m, 1h, 7d.")
@verb()
@click.pass_obj
def token(home: Path, *, expires: str, url: str | None, as_json: bool) -> None:
    """Create a join token for one node and print it, this once.

    It is good for one join, and yields the password of Redis, and so the whole system: give it only to machines that
    you trust.
    """
    name = f"node-{secrets.token_hex(4)}"
    new = NewKey(name=name, rights=["node"], expires_s=parse_seconds(expires, option="--expires"))
    with ApiClient(find_server(url, home)) as server:
        created = server.send_once("POST", "/api/v1/keys", new, KeyCreated)
    if as_json:
        output.json_data(created)
        return
    output.data(created.key)
    until = format_utc(created.info.expires_unix_ms)
    output.message(
        f"for one node, until {until} or `fs key revoke {name}`; on the other machine: FS_KEY=... fs node join URL"
    )


@command.command
@click.argument("server_url", metavar="[URL]", required=False)
@click.option("--token", "shown", default="", metavar="TOKEN", envvar="FS_KEY", help="Join token; default FS_KEY.")
@click.option("--name", envvar="FS_NODE", default="", help="The node's name; default: the host name.")
@click.option("--address", envvar="FS_NODE_ADDRESS", help="Where others reach this node; default: as seen from URL.")
@click.option(
    "--node-memory", envvar="FS_NODE_MEMORY", metavar="SIZE",
    help="Memory for workers and weights, such as 8GiB.",
)  # fmt: skip
@click.option("--region", envvar="FS_REGION", help="Region of this machine, such as eu.")
@click.option(
    "--foreground", is_flag=True,
    help="Stay in this terminal, as service managers need it; ctrl-C stops the node. If it was drained, it stays so.",
)  # fmt: skip
@verb(server=False)
@click.pass_obj
def join(
    home: Path,
    *,
    server_url: str | None,
    shown: str,
    name: str,
    address: str | None,
    node_memory: str | None,
    region: str | None,
    foreground: bool,
    as_json: bool,
) -> None:
    """Start a node on this machine, for the system at URL.

    The token (`fs node token`, on the first machine) is good once. It yields a certificate for a key that is made here,
    Redis and the store, which are stored in FS_HOME with address, region and memory: without URL, the node of this
    FS_HOME is started again, and has workers again if it was drained. An empty option, such as --region "", takes away
    what is stored. `fs down` stops it.

    \b
    FS_KEY=fs_... fs node join https://fleet.example.com:7443 --name vm2
    """
    layout = HomeLayout(home)
    if is_locked(layout.lock):
        raise StartFailed(
            f"a server or a node runs in {home} already", hint="`fs down` stops it; or use another FS_HOME"
        )
    if node_memory:
        parse_size(node_memory)
    if region:
        check_region(region)
    told = _told(layout, server_url, shown, name, address or "") if server_url else _known(layout)
    write_join(layout, record := told.again(address=address, region=region, node_memory=node_memory))
    record = msgspec.structs.replace(record, node=name or record.node)
    check_store(record.store)
    require_backends(redis=record.redis_url, store="")
    if not foreground:  # a service manager starts it again after a crash or a boot, and nobody has decided on workers
        end_drain(record)
    layout.create()
    environment = {  # its memory is an option of the supervisor's
        **{key: value for key, value in os.environ.items() if key not in ("FS_KEY", "FS_NODE_MEMORY")},
        "FS_NODE": record.node,
        "FS_NODE_ADDRESS": record.address,
        "FS_REGION": record.region,
        "FS_REDIS_URL": record.redis_url,
        "FS_STORE": record.store,
    }
    argv = [*SUPERVISOR, "--home", str(home), "--node-only", record.url, "--node-memory", record.node_memory]
    if foreground:
        os.execve(sys.executable, argv, environment)
    _start(argv, layout, environment, record)
    if as_json:
        output.json_data({"node": record.node, "address": record.address, "url": record.url})
    else:
        warn_of_isolation()
        output.message(f"node {record.node} is in; others reach it at {record.address}")
        output.data(record.node)


@command.command
@click.argument("node")
@click.option("--undo", is_flag=True, help="Let it have workers again.")
@verb()
@click.pass_obj
def drain(home: Path, *, node: str, undo: bool, url: str | None, as_json: bool) -> None:
    """Send a node's workers away, and start none there until --undo or the next `fs node join` by hand.

    Calls in progress end; the functions' next workers start on other nodes.
    """
    with ApiClient(find_server(url, home)) as server:
        if undo:
            state = server.delete(f"{object_path('nodes', node)}/drain", NodeInfo)
        else:
            state = server.put(f"{object_path('nodes', node)}/drain", None, NodeInfo)
    if as_json:
        output.json_data(state)
    else:
        output.data(f"{node} {'takes workers again' if undo else f'drains: {state.workers} workers left'}")


@command.command
@click.argument("node")
@click.option("--force", is_flag=True, help="Also one that lives: its workers end at once, and it gets no others.")
@verb()
@click.pass_obj
def remove(home: Path, *, node: str, force: bool, url: str | None, as_json: bool) -> None:
    """Forget a node that is gone, and void its certificate. Drain it first, and stop it on its machine with `fs down`.

    It joins again with a token only.
    """
    path = object_path("nodes", node) + ("?force=1" if force else "")
    with ApiClient(find_server(url, home)) as server:
        state = server.delete(path, NodeInfo)
    if as_json:
        output.json_data(state)
    elif state.alive:
        output.data(f"{node} lives, and gets no workers any more: stop it on its machine with `fs down`, and remove it")
    else:
        output.data(f"{node} is removed")


def _known(layout: HomeLayout) -> JoinRecord:
    """What the node of this home was told when it joined. Errors: InvalidInput, if none has."""
    known = read_join(layout)
    if known is None:
        raise InvalidInput(
            f"no node of {layout.home} has joined a system yet", hint="name one: fs node join https://HOST:7443"
        )
    return known


def _told(layout: HomeLayout, url: str, token: str, name: str, address: str) -> JoinRecord:
    """Asks the controller, and keeps the answer. Errors: FleetError."""
    from ...identity.certificates import new_request  # late: no other verb needs it

    if not token:
        raise InvalidInput(
            "a join token is needed, and none was given",
            hint="on the first machine: fs node token; here: --token TOKEN, or FS_KEY",
        )
    full = (url if "://" in url else f"http://{url}").rstrip("/")
    node = name or socket.gethostname()
    address = address or own_address(full)
    key, request = new_request(node)
    with ApiClient(find_server(full, layout.home)._replace(key=token)) as server:
        terms = server.send_once("POST", "/api/v1/nodes/join", NodeJoin(node=node, request=request), JoinTerms)
    layout.create()
    identity = Identity(certificate=terms.certificate, key=key, authority=terms.authority)
    write_identity(layout.home / "node" / FILE, identity)
    record = JoinRecord(
        url=full,
        redis_url=with_ca(terms.redis_url, write_redis_ca(layout, terms.redis_ca)),
        store=terms.store,
        node=node,
        address=address,
    )
    write_join(layout, record)  # the token is spent: whatever fails from here on, the next start needs none
    return record


def _start(argv: list[str], layout: HomeLayout, environment: Mapping[str, str], record: JoinRecord) -> None:
    """Starts the node in the background, and waits until it is in. Errors: StartFailed; nothing runs then."""
    clean_if_free(layout)  # deaths that a killed supervisor has counted are none of this start
    process = _spawn(argv, layout, environment)
    try:
        wait_joined(layout, record, process.pid)
    except KeyboardInterrupt:
        output.message("it goes on starting in the background; `fs down` stops it")
        raise
    except StartFailed:
        stop_supervisor(layout)
        raise


def _spawn(argv: list[str], layout: HomeLayout, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with layout.log("supervisor").open("ab") as log:
        return subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd="/",
            start_new_session=True,
        )
