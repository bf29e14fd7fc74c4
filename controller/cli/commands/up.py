"""`fs up`: starts the supervisor in the background, and waits until the system can serve a call."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import click
from click.core import ParameterSource

from fleetstart.runtime.contract.errors import FleetError, Forbidden, InvalidInput, StartFailed, Unauthorized
from fleetstart.runtime.contract.function.setting_checks import check_region
from fleetstart.runtime.contract.process.environment import ConfigError
from fleetstart.runtime.contract.process.redis_url import with_ca
from fleetstart.runtime.contract.sizes import parse_size
from fleetstart.runtime.contract.store_url import parse_store

from ...schemas.functions import SystemStatus
from .. import output
from ..api_client import ApiClient, own_server
from ..curl_hint import access_line
from ..doctor.checks import check_namespaces
from ..home import (
    HomeLayout,
    SupervisorRecord,
    clean_if_free,
    is_locked,
    read_record,
    read_services,
    read_supervisor,
    tail,
)
from ..local.backends import require_backends
from ..local.disk_room import lack_of_room
from ..local.listen import ListenAddress, parse_listen
from ..local.services import CONTROLLER, NODE, REDIS, find_redis
from ..output import Unreachable
from ..root import verb
from .down import stop_supervisor

FIRST_KEY_S = 3.0
"""Time that a new controller has to make the first key. Asked without one before, it would note a rejection in the
audit log; asked later, it says why there is none."""
DEADLINE_S = 60.0
"""Timeout of the start, enough for a cold disk and a busy machine; usually it takes one to two seconds."""
DEATHS_MAX = 5
"""Deaths of one service during the start after which it is given up."""
POLL_S = 0.05


@click.command
@click.option(
    "--port", default=7433, show_default=True, type=click.IntRange(0, 65535), help="Port of the server; 0: a free one."
)
@click.option(
    "--listen",
    default="",
    metavar="HOST[:PORT]",
    help="Serve other machines at this address too, such as 0.0.0.0:7443.",
)
@click.option("--tls-cert", default="", metavar="FILE", help="Certificate of --listen with its chain, PEM.")
@click.option("--tls-key", default="", metavar="FILE", help="Key of the certificate, PEM.")
@click.option(
    "--redis",
    default="",
    metavar="URL",
    envvar="FS_REDIS_URL",
    help="Use this Redis instead of a private one. In FS_REDIS_URL its password stays out of process lists.",
)
@click.option("--store", default="", metavar="PATH|s3://…", help="Where bundles and checkpoints are stored.")
@click.option("--node-memory", default="", metavar="SIZE", help="Memory for workers and weights, such as 8GiB.")
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    envvar="FS_LOG_FORMAT",
    help="Format of all logs.",
)
@click.option("--region", envvar="FS_REGION", default="", help="Region of this machine, such as eu.")
@click.option("--open", "is_open", is_flag=True, help="Let programs on this machine in without a key, from now on.")
@click.option("--foreground", is_flag=True, help="Stay in this terminal; ctrl-C stops everything.")
@verb(server=False)
@click.pass_obj
def command(
    home: Path,
    *,
    port: int,
    listen: str,
    tls_cert: str,
    tls_key: str,
    redis: str,
    store: str,
    node_memory: str,
    log_format: str,
    region: str,
    is_open: bool,
    foreground: bool,
    as_json: bool,
) -> None:
    """Start everything on this machine: Redis, controller, node.

    Prints the server's URL. If it runs already, says so and changes nothing. A Redis and a store that are given are
    tried first: written, read, deleted. Every request needs a key: the first start creates one and stores it in
    FS_HOME, from which the local fs reads it.
    """
    layout = HomeLayout(home)
    had_key = layout.key.exists()
    if is_open and had_key:
        raise StartFailed(
            f"{home} has a key, so it cannot be opened",
            hint="start it without --open, or use another FS_HOME for a separate system",
        )
    tls = _tls_files(tls_cert, tls_key)
    address = _listen_address(listen, tls=tls is not None, is_open=is_open or layout.is_open)
    if node_memory:
        parse_size(node_memory)
    if region:
        check_region(region)
    if store and isinstance(where := parse_store(store), Path):
        store = str(where.expanduser().absolute())
    redis = _with_ca(_found_redis(redis))
    _check_not_joined(layout)
    environment = {"FS_LOG_FORMAT": log_format, "FS_REGION": region, "FS_REDIS_URL": redis}
    argv = supervisor_argv(
        home,
        port=port,
        store=store,
        node_memory=node_memory,
        is_open=is_open,
        listen=str(address or ""),
        tls=tls,
    )
    if foreground:
        if is_locked(layout.lock):
            raise StartFailed(f"a server runs in {home} already", hint="stop it with `fs down` first")
        require_backends(redis=redis, store=store)
        os.execve(sys.executable, argv, {**os.environ, **environment})
    already = is_locked(layout.lock)
    status = _already_up(layout) if already else _start(layout, argv, environment, store)
    if layout.key.exists() and not had_key:
        output.message(f"created the first key, for this user only: {layout.key}")
    _tell_url(layout, status, started=not already, as_json=as_json)


def _start(layout: HomeLayout, argv: Sequence[str], environment: Mapping[str, str], store: str) -> SystemStatus:
    """Starts the system; returns its status. Errors: StartFailed; of a Redis or a store that is given and does not
    work."""
    require_backends(redis=environment["FS_REDIS_URL"], store=store)
    started_s = time.monotonic()
    clean_if_free(layout)  # deaths that a killed supervisor has counted are none of this start
    process = _spawn(argv, layout, environment)
    try:
        status = wait_ready(layout, process)
    except KeyboardInterrupt:
        output.message("it goes on starting in the background; `fs down` stops it")
        raise
    output.message(f"up in {time.monotonic() - started_s:.1f} s, in {layout.home}")
    return status


def _already_up(layout: HomeLayout) -> SystemStatus:
    """Status of the system that runs, once it is ready; says which options are ignored. Errors: StartFailed."""
    status = wait_ready(layout, None)
    output.message(f"already up, in {layout.home}")
    _say_ignored(click.get_current_context(), layout)
    return status


def _found_redis(redis: str) -> str:
    """The address that is given; without one there must be a server to start. Errors: StartFailed."""
    if not redis and find_redis() is None:
        raise StartFailed(
            "no Redis server is installed",
            hint="pip install 'fleetstart[server]' brings one, or name one: fs up --redis redis://host:6379",
        )
    return redis


def _listen_address(listen: str, *, tls: bool, is_open: bool) -> ListenAddress | None:
    """The address for other machines. Errors: InvalidInput, if it or its certificate is not what it must be."""
    if listen:
        address = parse_listen(listen)
        _check_listen(address, tls=tls, is_open=is_open)
        return address
    if tls:
        raise InvalidInput("--tls-cert is for --listen: programs on this machine use the loopback address without TLS")
    return None


def _check_not_joined(layout: HomeLayout) -> None:
    """Errors: StartFailed, if the node of another system runs in this home."""
    runs = read_supervisor(layout) if is_locked(layout.lock) else None
    if runs is not None and runs.joined:
        raise StartFailed(
            f"a node of the system at {runs.joined} runs in {layout.home}",
            hint="stop it with `fs down` first, or use another FS_HOME",
        )


def _tell_url(layout: HomeLayout, status: SystemStatus, *, started: bool, as_json: bool) -> None:
    """Prints how the system is reached, from here and from other machines."""
    warn_of_isolation()
    record = read_supervisor(layout)
    public_url = record.public_url if record is not None else ""
    if public_url:
        output.message(f"other machines reach it at {public_url}")
    output.message(access_line(status.access, own_server(layout.home)))
    if as_json:
        public = {"public_url": public_url} if public_url else {}
        output.json_data({"url": status.url, "home": str(layout.home), "started": started, **public})
    else:
        output.data(status.url)


def warn_of_isolation() -> None:
    """Says what a kernel that refuses namespaces means for the node that was started here."""
    finding = check_namespaces(best_effort=os.environ.get("FS_ISOLATION") == "best-effort")
    if finding.verdict != "ok":
        output.message(f"warning: {finding.found}")
        output.message(f"    {finding.advice}")


def _say_ignored(context: click.Context, layout: HomeLayout) -> None:
    """Names the options given on the command line that a system that runs already does not take."""
    given = [
        str(option.opts[0])
        for option in context.command.params
        if option.name != "as_json" and context.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE
    ]
    if given:
        record = read_supervisor(layout)
        where = f" (it runs at {record.url}, with the store {record.store})" if record else ""
        output.message(f"ignored, as it runs already: {', '.join(given)}{where}; `fs down` first to change that")


def supervisor_argv(
    home: Path,
    *,
    port: int,
    store: str = "",
    node_memory: str = "",
    is_open: bool,
    listen: str = "",
    tls: tuple[str, str] | None = None,
) -> list[str]:
    """The supervisor's command line. The URL of Redis is in its environment (FS_REDIS_URL): all users of a machine may
    read command lines."""
    options = ("--home", str(home), "--port", str(port), "--store", store)
    certificate, key = tls or ("", "")
    public = ("--listen", listen, "--tls-cert", certificate, "--tls-key", key)
    more = ("--node-memory", node_memory, *(["--open"] if is_open else []))
    return [sys.executable, "-P", "-m", "fleetstart.controller.cli.local.supervisor", *options, *public, *more]


def _with_ca(redis: str) -> str:
    """The URL with the file of FS_REDIS_CA. Errors: InvalidInput."""
    try:
        return with_ca(redis, os.environ.get("FS_REDIS_CA") or "") if redis else ""
    except ConfigError as error:
        raise InvalidInput(str(error)) from error


def _tls_files(certificate: str, key: str) -> tuple[str, str] | None:
    """Absolute paths of certificate and key, which belong together. Errors: InvalidInput."""
    if not certificate and not key:
        return None
    if not certificate or not key:
        raise InvalidInput("--tls-cert and --tls-key belong together: a certificate, and its key")
    from ...http.tls import server_context  # late, as few starts need it

    paths = str(Path(certificate).expanduser().absolute()), str(Path(key).expanduser().absolute())
    try:
        server_context(*paths)
    except ConfigError as error:
        raise InvalidInput(str(error), hint="both are PEM files, which this user must be able to read") from error
    return paths


def _check_listen(address: ListenAddress, *, tls: bool, is_open: bool) -> None:
    """Errors: InvalidInput, if other machines could call without a key."""
    if address.is_loopback:
        return
    if is_open:
        raise InvalidInput(
            f"{address.host} can be reached by other machines, and --open lets in without a key",
            hint="leave --open away, or use another FS_HOME if this one was opened before",
        )
    if not tls:
        output.message(
            f"warning: {address} has no TLS: keys, inputs and answers can be read on the way; "
            "use --tls-cert and --tls-key, or a network that nobody else can read"
        )


def _spawn(argv: Sequence[str], layout: HomeLayout, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    layout.create()
    with layout.log("supervisor").open("ab") as log:
        return subprocess.Popen(
            argv,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd="/",
            start_new_session=True,
        )


def wait_ready(layout: HomeLayout, process: subprocess.Popen[bytes] | None) -> SystemStatus:
    """Waits until a node is registered, and returns the server's status. Stops everything if that fails."""
    began = time.monotonic()
    ends = began + DEADLINE_S
    shown = ""
    while time.monotonic() < ends:
        if process is not None and process.poll() is not None and not is_locked(layout.lock):
            _fail(layout, "supervisor", f"the supervisor ended with status {process.returncode}")
        waiting, status = _look(layout, keyless=layout.is_open or time.monotonic() - began > FIRST_KEY_S)
        if status is not None and not waiting:
            return status
        if waiting != shown:
            shown = waiting
            output.message(f"waiting for {waiting}")
        for name, record in read_services(layout).items():
            if record.deaths >= DEATHS_MAX and process is not None:
                _fail(layout, name, f"the {name} ended {record.deaths} times while starting")
        time.sleep(POLL_S)
    part = {"Redis": REDIS, "the controller": CONTROLLER, "a node": NODE}.get(shown, "supervisor")
    _fail(layout, part, f"{shown} was not ready after {DEADLINE_S:.0f} s", leave=process is None)


def _look(layout: HomeLayout, *, keyless: bool) -> tuple[str, SystemStatus | None]:
    """The part that is still missing, and the status if there is one. Unless `keyless`, asks with a key alone."""
    if read_record(layout.supervisor, SupervisorRecord) is None or not layout.endpoint.exists():
        return "the supervisor", None
    services = read_services(layout)
    if CONTROLLER not in services or not services[CONTROLLER].pid:
        return "Redis", None
    address = own_server(layout.home)
    if not address.key and not keyless:
        return "the controller", None
    with suppress(Unreachable), ApiClient(address, timeout_s=2.0) as server:
        try:
            status = server.get("/api/v1/status", SystemStatus)
        except (Unauthorized, Forbidden) as error:
            if own_server(layout.home).key != address.key:
                return "the controller", None  # it made the first key while we waited for its answer
            hint = f"it is up, and {layout.key} has no key that may read: set FS_KEY to one, or `fs key recover`"
            raise type(error)(error.message, hint=hint) from error
        except FleetError:
            return "the controller", None
        if status.redis != "ok":
            return "Redis", status
        return ("" if status.nodes else "a node"), status
    return "the controller", None


def _fail(layout: HomeLayout, part: str, reason: str, *, leave: bool = False) -> NoReturn:
    lines = tail(layout.log(part), 20)
    if lines:
        output.message(f"the last lines of {layout.log(part)}:")
        for line in lines:
            output.message(f"    {line}")
    if not leave:
        stop_supervisor(layout)
    if lack := lack_of_room(layout.home):
        raise StartFailed(f"{reason}: {lack}", hint="make room there, or set FS_HOME to a folder on another disk")
    raise StartFailed(reason, hint=f"all logs are in {layout.logs}; `fs doctor` checks what this machine lacks")
