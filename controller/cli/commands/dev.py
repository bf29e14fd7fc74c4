"""`fs dev`: a whole system of its own for one handler, deployed again at each save, gone with ctrl-C.

It is the very system that `fs up` starts, in a folder that is removed afterwards: what works here works there. A save
that cannot be read, or whose worker does not start, is told of, and the version before it goes on serving. With --url
there is no system of its own, but a function of its own on another one, which is removed in the end.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from fleetstart.runtime.contract.errors import FleetError, NotFound

from ...schemas.functions import Deployed, FunctionInfo
from .. import output
from ..api_client import Address, ApiClient, find_server, function_path
from ..handler.select import flags_of, select_handlers
from ..home import HomeLayout
from ..local.cold_start_probe import ColdStartProbe
from ..local.dev_target import belongs_to_others, create_secrets, dev_name, require_own, with_dev_name
from ..local.file_watch import ChangeDetector, file_stamps
from ..local.supervisor import kill_with_parent
from ..root import verb
from .deploy import bundle_of, deploy_all, setting_flags
from .down import stop_supervisor
from .logs import format_line
from .up import supervisor_argv, wait_ready

LOOK_S = 0.3
"""Between two looks at the files; a change is deployed at the second look that sees it."""
PREFIX = "fs-dev-"


@click.command(
    epilog="""Examples:

    fs dev handler.py

    fs dev handler.py --cold --body '{"name": "Ada"}'

    fs dev handler.py --url https://fleet.example.com"""
)
@click.argument("handler", metavar="HANDLER.PY[:NAME]")
@setting_flags
@click.option("--port", default=0, type=click.IntRange(0, 65535), help="Default: a free one.")
@click.option("--cold", is_flag=True, help="Call it from zero after each save, and at Enter; show where the time went.")
@click.option("--path", default="", metavar="PATH", help="Of the calls of --cold, such as /v1/chat/completions.")
@click.option("--body", default="{}", metavar="JSON|@FILE", help="Of the calls of --cold; default {}.")
@click.option("--url", default="", help="Serve it there, as NAME-dev, instead of on a system of its own.")
@verb(server=False)
@click.pass_obj
def command(
    home: Path,
    /,
    *,
    handler: str,
    port: int,
    cold: bool,
    path: str,
    body: str,
    url: str,
    as_json: bool,
    **flags: Any,
) -> None:
    """Serve a handler on this machine while you work on it: the same contract, deployed again at each save.

    Needs no server: it starts one of its own, which whoever is on this machine may call without a key, and ctrl-C
    leaves nothing of it. Prints the URLs, then what the workers
    print. A save that does not work is told of, and the version before it goes on serving. With --cold, no worker and
    no weights stay between calls, and each save shows what it did to the cold start.
    """
    if cold and url:
        raise click.UsageError("--cold empties the memory of its own system, which that of --url is not: give one")
    file, handlers = select_handlers(
        handler, flags_of(**flags)
    )  # what is wrong with it is said before anything is started
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # a polite end is a ctrl-C
    if cold:
        flags |= {"keep_alive_s": 0.0, "min_workers": 0}
    cache = HomeLayout(home).cache
    if url:
        address = find_server(url, home)
        with ApiClient(address) as server:
            for one in handlers:
                require_own(server, dev_name(with_dev_name(one.declaration)))
            work = _Work(server, address, handler, flags, cache, as_json=as_json, elsewhere=True)
            try:
                work.go_on(file)
            finally:
                work.remove()
        return
    with _own_system(port, keep_weights=not cold) as own, ApiClient(own) as server:
        cold_probe = ColdStartProbe(server=server, path=path, body=body, as_json=as_json) if cold else None
        _Work(server, Address(own), handler, flags, cache, as_json=as_json, cold_probe=cold_probe).go_on(file)


class _Work:
    """On one handler, on one server."""

    def __init__(
        self,
        server: ApiClient,
        address: Address,
        handler: str,
        flags: dict[str, Any],
        cache: Path,
        *,
        as_json: bool,
        elsewhere: bool = False,
        cold_probe: ColdStartProbe | None = None,
    ) -> None:
        self._server = server
        self._address = address
        self._handler = handler
        self._flags = flags
        self._cache = cache
        self._as_json = as_json
        self._elsewhere = elsewhere
        self._cold_probe = cold_probe
        self._names: list[str] = []
        """Of what is elsewhere, whatever came of its deploy."""
        self._followed: set[str] = set()

    def go_on(self, file: Path) -> None:
        """Until ctrl-C."""
        with suppress(KeyboardInterrupt):
            saves = ChangeDetector(file_stamps(file.parent))
            enter = _enter() if self._cold_probe is not None else threading.Event()
            included = self._deploy()
            self._probe()
            while True:
                time.sleep(LOOK_S)
                if saves.changed(file_stamps(file.parent, included)):
                    files = self._deploy()
                    included = files or included
                    if files:
                        self._probe()
                elif enter.is_set():
                    self._probe()
                enter.clear()

    def remove(self) -> None:
        """What was deployed elsewhere; what cannot be removed is told of."""
        for name in self._names:
            try:
                if belongs_to_others(self._server, name):
                    continue
                self._server.delete(function_path(name), FunctionInfo)
                output.message(f"{name} removed")
            except NotFound:
                continue
            except FleetError as error:
                output.message(f"{name} stays at {self._address.url}: {error.message}; remove it with `fs rm {name}`")

    def _deploy(self) -> tuple[str, ...]:
        """What the bundle has in it; nothing if it came to none. New names are printed and followed."""
        try:
            path, handlers = select_handlers(self._handler, flags_of(**self._flags))
            declarations = [one.declaration for one in handlers]
            if self._elsewhere:
                declarations = [with_dev_name(declaration) for declaration in declarations]
                for name in map(dev_name, declarations):
                    require_own(self._server, name)
                    self._names += [name] if name not in self._names else []
            else:
                create_secrets(self._server, declarations, os.environ)
            bundle = bundle_of(path, declarations)
            deployed = deploy_all(self._server, declarations, path, bundle, {"probe": 1}, self._cache)
        except (FleetError, click.UsageError) as error:
            self._tell(error)
            return ()
        for one in deployed:
            self._follow(one)
        return bundle.files

    def _follow(self, deployed: Deployed) -> None:
        if deployed.name in self._followed:
            return
        self._followed.add(deployed.name)
        threading.Thread(target=_follow, args=(self._address, deployed.name, self._as_json), daemon=True).start()
        if self._as_json:
            output.json_line(deployed)
        else:
            output.data(deployed.url)

    def _probe(self) -> None:
        if self._cold_probe is None:
            return
        for name in sorted(self._followed):
            try:
                self._cold_probe.probe(name)
            except (FleetError, click.UsageError) as error:
                self._tell(error)

    def _tell(self, error: FleetError | click.UsageError) -> None:
        told = error if isinstance(error, FleetError) else FleetError(error.format_message())
        output.show_error(told, as_json=self._as_json)


def _enter() -> threading.Event:
    """Set at each line on stdin."""
    pressed = threading.Event()

    def read() -> None:
        for _ in sys.stdin:
            pressed.set()

    threading.Thread(target=read, daemon=True).start()
    return pressed


def _follow(address: Address, name: str, as_json: bool) -> None:
    """Until the server is gone."""
    with suppress(FleetError), ApiClient(address) as server:
        for line in server.log_lines(name, tail=0, follow=True):
            if as_json:
                output.json_line(line)
            else:
                output.data(format_line(line))


@contextmanager
def _own_system(port: int, *, keep_weights: bool) -> Iterator[str]:
    """The URL of a system in a folder of its own; both are gone afterwards, the processes also if we are killed."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    layout = HomeLayout(folder / "home")
    try:
        layout.create()
        with layout.log("supervisor").open("ab") as log:
            process = subprocess.Popen(
                supervisor_argv(layout.home, port=port, is_open=True),
                env={**os.environ, **({} if keep_weights else {"FS_KEEP_WEIGHTS": "0"})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd="/",
                start_new_session=True,
                preexec_fn=kill_with_parent(os.getpid()),
            )
        try:
            yield wait_ready(layout, process).url
        finally:
            output.message("stopping")
            stop_supervisor(layout)
            process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
