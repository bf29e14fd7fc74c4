"""`fs shell`: opens a shell, or runs a command, in the environment of a function's workers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from fleetstart.runtime.contract.errors import NotFound
from fleetstart.runtime.contract.node.shell import IDLE_MOST_S

from .. import output
from ..api_client import ApiClient, find_server, function_path, nearest_function
from ..completions import function_names
from ..root import verb


@click.command(
    epilog="""Examples:

    fs shell chat

    fs shell chat@3 -- python -c 'import handler'

    fs shell chat -- sh -c 'cat > /tmp/x; sha256sum /tmp/x' < file"""
)
@click.argument("which", metavar="NAME[@VERSION]", shell_complete=function_names)
@click.argument("argv", metavar="[-- CMD ARGS...]", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--idle",
    type=click.FloatRange(1, IDLE_MOST_S),
    metavar="SECONDS",
    help="Idle time after which it ends; default 900.",
)
@verb()
@click.pass_obj
def command(
    home: Path, *, which: str, argv: tuple[str, ...], idle: float | None, url: str | None, as_json: bool
) -> int:
    """Open a shell, or run a command, in the environment of a function's workers, on a node.

    It runs in a new sandbox with the isolation, files, packages, environment, secrets and memory limit of a worker:
    calls are not disturbed, and the function may be scaled to zero. Needs a key with scope deploy; costs nothing. The
    exit status is the command's; with --json it is in the output, with what was printed.
    """
    if as_json and not argv:
        raise click.UsageError("--json is for a command: fs shell NAME --json -- CMD")
    # late: only this verb speaks WebSocket
    from ..remote_shell import ShellRequest, run_shell, write_all

    name, _, version = which.partition("@")
    address = find_server(url, home)
    wanted = ShellRequest(
        path=f"{function_path(name)}/shell",
        version=version or "live",
        idle_s=idle,
        argv=argv,
        terminal=not argv and sys.stdin.isatty(),
    )
    printed: dict[int, bytearray] = {1: bytearray(), 2: bytearray()}
    try:
        status = run_shell(address, wanted, (lambda fd, data: printed[fd].extend(data)) if as_json else write_all)
    except NotFound as error:
        with ApiClient(address) as server:
            error.hint = (nearest_function(server, name) if "version" not in error.message else "") or error.hint
        raise
    if not as_json:
        return status
    out, err = (printed[fd].decode(errors="replace") for fd in (1, 2))
    answer: dict[str, Any] = {"status": status, "stdout": out, "stderr": err}
    output.json_data(answer)
    return output.OK
