"""The root of `fs`: finds the verb, loads its module alone, and turns every error into words and an exit code.

Loading verbs late keeps `fs --help` fast: it must not pay for HTTP clients and tables that it does not use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import click

from fleetstart.runtime.contract.errors import FleetError

from .output import EXIT_CODES, FAILED, INTERRUPTED, OK, USAGE, exit_code, show_error

Command = TypeVar("Command", bound=Callable[..., Any])

KEY_META = "fleetstart.key"
"""Where the command's context has FS_KEY."""
VERBS = {
    "up": "Start everything on this machine: Redis, controller, node.",
    "down": "Stop everything that `fs up` started.",
    "status": "Show the server, its nodes and its functions.",
    "deploy": "Deploy the functions in a handler file.",
    "dev": "Serve a handler on this machine while you work on it, anew at each save.",
    "config": "Show each setting of a handler, and where it was made.",
    "ls": "List functions.",
    "invoke": "Call a function.",
    "invocations": "List async calls; show, cancel and redrive them.",
    "replay": "Make a past call again, and compare the answers.",
    "schedules": "List functions that are called by the clock.",
    "webhooks": "Show the secret that webhooks are signed with; deliver one again.",
    "logs": "Show what a function's workers printed.",
    "shell": "Open a shell, or run a command, where a function's workers run.",
    "trace": "Show where the time of an invocation went.",
    "explain": "Show why a call's worker was started as it was, and what came of it.",
    "dashboard": "Print the URL of the dashboard, or open it.",
    "weights": "Send, list, check, export and remove checkpoints.",
    "versions": "List a function's versions, and what calls go to.",
    "rollback": "Go back to a version that was live before.",
    "alias": "Show, set and remove names for versions.",
    "split": "Split a function's calls over versions.",
    "scale": "Change how many workers a function has, without a deploy.",
    "nodes": "Show the nodes, and what lies on each.",
    "usage": "Show the bill, by function, version, phase, key, project, tag or day.",
    "invoice": "Show the bill of a month, line by line as it was priced.",
    "budget": "Set, list and remove what functions may cost.",
    "price": "Show the price sheets, and set rates for what is to come.",
    "key": "Make, list, rotate and revoke API keys.",
    "project": "Group functions, with quotas.",
    "secret": "Set, list and remove what workers get in their environment.",
    "audit": "Show who changed what, and what was refused.",
    "rm": "Remove a function.",
    "completion": "Print the script for completion in bash, zsh or fish.",
    "doctor": "Check what this machine offers, and say what to do about the rest.",
}


class RootGroup(click.Group):
    """Knows the verbs by name; imports `commands/<verb>.py` only when that verb is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = import_module(f"fleetstart.controller.cli.commands.{cmd_name}").command
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
                    ("FS_URL", "the server to talk to; without it, the one that `fs up` started"),
                    (
                        "FS_KEY",
                        "the API key to show there; without it, the one that is kept in FS_HOME for its own server",
                    ),
                    ("FS_HOME", "where `fs up` keeps state, logs and run files (~/.fleetstart)"),
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
    ctx.meta[KEY_META] = (key or "").strip()
    ctx.obj = (home or Path.home() / ".fleetstart").expanduser().absolute()


def verb(*, server: bool = True) -> Callable[[Command], Command]:
    """Options that every verb has: `--json`, and `--url` if it talks to a server."""

    def decorate(function: Command) -> Command:
        function = click.option("--json", "as_json", is_flag=True, help="Data as JSON on stdout.")(function)
        if server:
            function = click.option(
                "--url", envvar="FS_URL", help="The server; default FS_URL, then the one of `fs up`."
            )(function)
        return function

    return decorate


def run(arguments: Sequence[str]) -> int:
    """The whole command line as a function: arguments in, exit code out."""
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
    except BrokenPipeError:
        # Whoever read our stdout has enough of it, as in `fs logs chat | head`. Nothing more can be said there.
        sys.stdout = None
        return OK


def main() -> None:
    sys.exit(run(sys.argv[1:]))
