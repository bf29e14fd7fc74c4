"""Root of `fs`: finds the verb, loads only its module, and turns every error into a message and an exit code.

Loading verbs late keeps `fs --help` fast: it must not pay for HTTP clients and tables that it does not use.
"""

from __future__ import annotations

import errno
import gc
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import click

from fleetstart.runtime.contract.errors import FleetError, NotFound
from fleetstart.runtime.contract.process.program import run_program
from fleetstart.runtime.contract.process.unused_modules import leave_out_unused_modules

from . import end_at_once
from .output import EXIT_CODES, FAILED, INTERRUPTED, OK, USAGE, exit_code, show_error, show_what_the_terminal_cannot

Command = TypeVar("Command", bound=Callable[..., Any])

KEY_META = "fleetstart.key"
"""Key of FS_KEY in the command's context."""
DISK_ERRORS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO))
"""Errors of a write, which do not name the file."""
VERBS = {
    "up": "Start everything on this machine: Redis, controller, node.",
    "down": "Stop everything that `fs up` started.",
    "status": "Show the server, its nodes and its functions.",
    "deploy": "Deploy the functions in a handler file.",
    "dev": "Serve a handler on this machine while you work on it; redeploy at each save.",
    "config": "Show each setting of a handler, and its origin.",
    "ls": "List functions.",
    "invoke": "Call a function.",
    "invocations": "List async calls; show, cancel and redrive them.",
    "replay": "Repeat a past call, and compare the answers.",
    "schedules": "List functions with a schedule, and their next calls.",
    "webhooks": "Show the secret that signs webhooks; deliver a webhook again.",
    "logs": "Show the log lines of a function's workers.",
    "shell": "Open a shell, or run a command, in the environment of a function's workers.",
    "trace": "Show the timeline of an invocation.",
    "explain": "Show the placement decision behind an invocation's worker, and its result.",
    "history": "Show calls, errors, latencies, starts and cost over hours or days.",
    "dashboard": "Print the URL of the dashboard, or open it.",
    "weights": "Push, list, verify, export and remove checkpoints, and their uploads.",
    "versions": "List a function's versions, and the traffic of each.",
    "rollback": "Roll back to a version that was live before.",
    "alias": "Show, set and remove aliases of versions.",
    "split": "Split a function's calls over versions.",
    "scale": "Change how many workers a function has, without a deploy.",
    "nodes": "Show the nodes, with memory, weights and workers.",
    "node": "Let another machine join as a node; drain and remove nodes.",
    "usage": "Show usage and cost, by function, version, phase, key, project, tag or day.",
    "invoice": "Show the invoice of a month, line by line.",
    "budget": "Set, list and remove budgets of functions.",
    "price": "Show the price sheets, and set rates from a later moment on.",
    "key": "Create, list, rotate and revoke API keys.",
    "project": "Group functions into projects with quotas.",
    "secret": "Set, list and remove secrets for workers' environments.",
    "volume": "Put folders into the store for functions to read or write; list, get, prune and remove them.",
    "audit": "Show the audit log: changes and rejected requests.",
    "rm": "Remove a function.",
    "image": "Build and list the container images of fleetstart.",
    "backup": "Write what the system cannot compute again to a file.",
    "restore": "Restore a backup into the Redis of a stopped system.",
    "completion": "Print the completion script for bash, zsh or fish.",
    "doctor": "Check this machine, and advise on what is missing or slow.",
}


@contextmanager
def _readers_may_leave() -> Iterator[None]:
    """Ends the command well when the reader of stdout has closed it, as in `fs logs chat | head`: click fails then."""
    try:
        yield
    except BrokenPipeError as error:
        raise click.exceptions.Exit(OK) from error


class RootGroup(click.Group):
    """Group of all verbs; imports `commands/<verb>.py` only when that verb is used."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        with _readers_may_leave():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _readers_may_leave():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = import_module(f"fleetstart.controller.cli.commands.{cmd_name}").command
        if signal.getsignal(signal.SIGINT) is end_at_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in EXIT_CODES.items()])
        with formatter.section("Environment"):
            formatter.write_dl(
                [
                    ("FS_URL", "URL of the server; without it, the one that `fs up` started"),
                    (
                        "FS_KEY",
                        "the API key for it; without it, the key in FS_HOME, for the server of that home only",
                    ),
                    ("FS_HOME", "folder of `fs up` for state, logs and run files (~/.fleetstart)"),
                ]
            )

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            from difflib import get_close_matches

            near = get_close_matches(args[0], VERBS, n=1)
            ctx.fail(f"no command {args[0]!r}" + (f"; did you mean `fs {near[0]}`?" if near else "; see `fs --help`"))
        return super().resolve_command(ctx, args)


def _show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from importlib.metadata import version  # late: it is slow to import

        click.echo(f"fleetstart {version('fleetstart')}")
        ctx.exit()


@click.command(cls=RootGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="The version.")
@click.option("--home", type=click.Path(path_type=Path), envvar="FS_HOME", hidden=True)
@click.option("--key", envvar="FS_KEY", hidden=True)
@click.pass_context
def root(ctx: click.Context, home: Path | None, key: str | None) -> None:
    """Serverless functions for models: deploy a handler with its weights, call it, pay for the call alone."""
    settle(ctx, home=home, key=key)


def settle(ctx: click.Context, *, home: Path | None, key: str | None) -> None:
    """Gives all verbs the key, in the contexts' common `meta`, and FS_HOME, as the context's object."""
    ctx.meta[KEY_META] = (key or "").strip()
    ctx.obj = (home or Path.home() / ".fleetstart").expanduser().absolute()


def verb(*, server: bool = True) -> Callable[[Command], Command]:
    """Decorator with the options of every verb: `--json`, and `--url` if it talks to a server."""

    def decorate(function: Command) -> Command:
        function = click.option("--json", "as_json", is_flag=True, help="Data as JSON on stdout.")(function)
        if server:
            function = click.option(
                "--url", envvar="FS_URL", help="The server; default FS_URL, then the one of `fs up`."
            )(function)
        return function

    return decorate


def _json_last(arguments: Sequence[str]) -> list[str]:
    """The command line with a `--json` that stands before the verb at its end, where the verb's own options are."""
    found = list(arguments)
    if found[:1] != ["--json"] or len(found) == 1:
        return found
    end = found.index("--") if "--" in found else len(found)
    return [*found[1:end], "--json", *found[end:]]


def run(arguments: Sequence[str]) -> int:
    """Runs a command line, and returns its exit code."""
    arguments = _json_last(arguments)
    try:
        result = root.main(list(arguments), prog_name="fs", standalone_mode=False)
        return result if isinstance(result, int) else OK
    except FleetError as error:
        show_error(error, as_json="--json" in arguments)
        return exit_code(error)
    except click.UsageError as error:
        error.show()
        return USAGE
    except click.ClickException as error:
        error.show()
        return FAILED
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except UnicodeEncodeError:
        from .home import is_text  # late: help needs no home

        odd = next((argument for argument in arguments if not is_text(argument)), None)
        if odd is None:
            raise
        click.UsageError(f"{odd!r} is not UTF-8, as names are").show()
        return USAGE
    except OSError as error:
        where = error.filename or ("a file, or stdout" if error.errno in DISK_ERRORS else None)
        if where is None:
            raise
        kind = NotFound if isinstance(error, FileNotFoundError) else FleetError
        told = kind(f"{where}: {error.strerror}", hint="look at the path, its permissions and its disk's room")
        show_error(told, as_json="--json" in arguments)
        return exit_code(told)


def main() -> None:
    leave_out_unused_modules()
    show_what_the_terminal_cannot()
    gc.set_threshold(20_000)  # a command imports, and has ended before there is much to collect
    run_program(lambda: run(sys.argv[1:]))
