"""`fs dev`: a whole system of its own for one handler, deployed again at each save, gone with ctrl-C.

It is the very system that `fs up` starts, in a folder that is removed afterwards: what works here works there. A save
that cannot be read, or whose worker does not start, is told of, and the version before it goes on serving.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from fleetstart.controller.cli import output
from fleetstart.controller.cli.client import Server
from fleetstart.controller.cli.commands.deploy import bundle_of, deploy_all, setting_flags
from fleetstart.controller.cli.commands.down import stop
from fleetstart.controller.cli.commands.logs import shown
from fleetstart.controller.cli.commands.up import supervisor_argv, wait_ready
from fleetstart.controller.cli.handlers import flags_of, select
from fleetstart.controller.cli.layout import Layout
from fleetstart.controller.cli.own_secrets import provide
from fleetstart.controller.cli.root import verb
from fleetstart.controller.cli.saves import Saves, stamps
from fleetstart.controller.cli.supervisor import dies_with
from fleetstart.runtime.contract.errors import FleetError

LOOK_S = 0.3
"""Between two looks at the files; a change is deployed at the second look that sees it."""
PREFIX = "fs-dev-"


@click.command
@click.argument("handler", metavar="HANDLER.PY[:NAME]")
@setting_flags
@click.option("--port", default=0, type=click.IntRange(0, 65535), help="Default: a free one.")
@verb(server=False)
@click.pass_obj
def command(home: Path, /, *, handler: str, port: int, as_json: bool, **flags: Any) -> None:
    """Serve a handler on this machine while you work on it: the same contract, deployed again at each save.

    Needs no server: it starts one of its own, and ctrl-C leaves nothing of it. Prints the URLs, then what the workers
    print. A save that does not work is told of, and the version before it goes on serving.
    """
    path, _ = select(handler, flags_of(**flags))  # what is wrong with it is said before anything is started
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite end is a ctrl-C
    with _own_system(port) as url, Server(url) as server:
        names: set[str] = set()
        saves = Saves(stamps(path.parent))
        included = _deploy(server, handler, flags, Layout(home).cache, names, as_json=as_json)
        with suppress(KeyboardInterrupt):
            while True:
                time.sleep(LOOK_S)
                if saves.changed(stamps(path.parent, included)):
                    included = _deploy(server, handler, flags, Layout(home).cache, names, as_json=as_json) or included


def _deploy(
    server: Server, handler: str, flags: dict[str, Any], cache: Path, names: set[str], *, as_json: bool
) -> tuple[str, ...]:
    """What the bundle has in it; nothing if it came to none. New names are printed and followed."""
    try:
        path, handlers = select(handler, flags_of(**flags))
        declarations = [one.declaration for one in handlers]
        provide(server, declarations, os.environ)
        bundle = bundle_of(path, declarations)
        deployed = deploy_all(server, declarations, path, bundle, {"probe": 1}, cache)
    except (FleetError, click.UsageError) as error:
        told = error if isinstance(error, FleetError) else FleetError(error.format_message())
        output.show_error(told, as_json=as_json)
        return ()
    for one in deployed:
        if one.name not in names:
            names.add(one.name)
            threading.Thread(target=_follow, args=(server.url, one.name, as_json), daemon=True).start()
            if as_json:
                output.json_line(one)
            else:
                output.data(one.url)
    return bundle.files


def _follow(url: str, name: str, as_json: bool) -> None:
    """Until the server is gone."""
    with suppress(FleetError), Server(url) as server:
        for line in server.log_lines(name, tail=0, follow=True):
            if as_json:
                output.json_line(line)
            else:
                output.data(shown(line))


@contextmanager
def _own_system(port: int) -> Iterator[str]:
    """The URL of a system in a folder of its own; both are gone afterwards, the processes also if we are killed."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    layout = Layout(folder / "home")
    try:
        layout.create()
        with layout.log("supervisor").open("ab") as log:
            process = subprocess.Popen(
                supervisor_argv(layout.home, port=port),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd="/",
                start_new_session=True,
                preexec_fn=dies_with(os.getpid()),
            )
        try:
            yield wait_ready(layout, process).url
        finally:
            output.say("stopping")
            stop(layout)
            process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
