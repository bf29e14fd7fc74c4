"""`fs dev`: serves one handler on a temporary local system, and redeploys it at each save, until ctrl-C.

The system is the same that `fs up` starts, in a folder that is removed afterwards. If a save cannot be deployed, the
error is printed and the previous version keeps serving. With --url the function is deployed to another server under a
name of its own, and removed in the end.
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

from fleetstart.runtime.contract.errors import FleetError, NotFound, StartFailed
from fleetstart.runtime.contract.process.parent_death import kill_with_parent

from ...schemas.functions import Deployed, FunctionInfo
from .. import output
from ..api_client import Address, ApiClient, find_server, function_path
from ..completions import files
from ..handler.select import flags_of, select_handlers
from ..handler.setting_flags import setting_flags
from ..home import HomeLayout
from ..local.cold_start_probe import ColdStartProbe
from ..local.dev_target import belongs_to_others, create_secrets, dev_name, require_own, with_dev_name
from ..local.file_watch import ChangeDetector, file_stamps
from ..root import verb
from .deploy import bundle_of, deploy_all, read_functions
from .down import stop_supervisor
from .logs import format_line
from .up import supervisor_argv, wait_ready

LOOK_S = 0.3
"""Interval at which files are checked; a change is deployed at the second check that sees it."""
PREFIX = "fs-dev-"
EMPTY = "{}"


@click.command(
    epilog="""Examples:

    fs dev handler.py

    fs dev handler.py --cold --body '{"name": "Ada"}'

    fs dev handler.py --url https://fleet.example.com"""
)
@click.argument("handler", metavar="HANDLER.PY[:NAME]", shell_complete=files)
@setting_flags
@click.option("--port", default=0, type=click.IntRange(0, 65535), help="Port of the server; default: a free one.")
@click.option("--cold", is_flag=True, help="Call it from zero after each save, and at Enter; show the timeline.")
@click.option("--path", default="", metavar="PATH", help="Path of --cold's calls, such as /v1/chat/completions.")
@click.option("--body", default=EMPTY, metavar="JSON|@FILE", help="Body of --cold's calls; default {}.")
@click.option("--url", default="", help="Deploy it to this server as NAME-dev, not to a local system.")
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
    """Serve a handler on this machine while you work on it, and redeploy it at each save.

    Starts a local server, which programs on this machine may call without a key, and removes it at ctrl-C. Prints the
    URLs, then the workers' logs. If a save cannot be deployed, the error is printed and the previous version keeps
    serving. With --cold, no worker and no weights stay between calls, and each save shows the change of the cold start.
    """
    if (path or body != EMPTY) and not cold:
        raise click.UsageError("--path and --body are for the calls of --cold: give that, too")
    if cold and url:
        raise click.UsageError("--cold works on the local system only: give it without --url")
    file, handlers = select_handlers(handler, flags_of(**flags))  # errors in it are raised before anything is started
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # ends like ctrl-C
    if cold:
        flags |= {"keep_alive_s": 0.0, "standby_s": 0.0, "min_workers": 0}
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
    """Deploys one handler to one server, again and again."""

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
        """Names of functions on another server, also of failed deploys."""
        self._followed: set[str] = set()

    def go_on(self, file: Path) -> None:
        """Deploys again at each change, until ctrl-C."""
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
                    enter.clear()  # before the call: an Enter that comes meanwhile is for another one
                    self._probe()

    def remove(self) -> None:
        """Removes the functions that were deployed to another server; prints errors."""
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
        """Deploys; returns the bundle's files, none after an error. Prints new functions and follows their logs."""
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
            deployed = deploy_all(
                self._server, read_functions(declarations, path), path, bundle, {"probe": 1}, self._cache
            )
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
        shown_error = error if isinstance(error, FleetError) else FleetError(error.format_message())
        output.show_error(shown_error, as_json=self._as_json)


def _enter() -> threading.Event:
    """An event that is set at each line on stdin."""
    pressed = threading.Event()

    def read() -> None:
        for _ in sys.stdin:
            pressed.set()

    threading.Thread(target=read, daemon=True).start()
    return pressed


def _follow(address: Address, name: str, as_json: bool) -> None:
    """Prints a function's log lines until the server ends."""
    with suppress(FleetError), ApiClient(address) as server:
        for line in server.log_lines(name, tail=0, follow=True):
            if as_json:
                output.json_line(line)
            else:
                output.data(format_line(line, time.time(), zone=None))


@contextmanager
def _own_system(port: int, *, keep_weights: bool) -> Iterator[str]:
    """URL of a temporary local system. Its folder is removed afterwards; its processes end with this one."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    layout = HomeLayout(folder / "home")
    try:
        layout.create()
        with layout.log("supervisor").open("ab") as log:
            process = subprocess.Popen(
                supervisor_argv(layout.home, port=port, is_open=True),
                env={**os.environ, "FS_REDIS_URL": "", **({} if keep_weights else {"FS_KEEP_WEIGHTS": "0"})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd="/",
                start_new_session=True,
                preexec_fn=kill_with_parent(os.getpid()),
            )
        try:
            try:
                ready = wait_ready(layout, process)
            except StartFailed as error:  # its hint names the logs, which are removed
                hint = "the lines above are the end of its log; `fs doctor` checks what this machine lacks"
                raise StartFailed(error.message, hint=hint) from error
            yield ready.url
        finally:
            output.message("stopping")
            if not stop_supervisor(layout):
                process.terminate()  # it has not taken its lock yet, by which it is known
            process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
