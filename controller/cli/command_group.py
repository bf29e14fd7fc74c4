"""Command group for verbs with subcommands (`fs weights push`). Suggests the nearest name for an unknown subcommand,
and shows the whole first sentence of each."""

from __future__ import annotations

import click

SENTENCE_MAX = 500
"""click cuts a sentence where the line ends; this is longer than any, so that it goes on in the next line."""


class CommandGroup(click.Group):
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, command.get_short_help_str(SENTENCE_MAX)) for name, command in commands if command is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            from difflib import get_close_matches

            near = get_close_matches(args[0], self.commands, n=1)
            name = ctx.command_path
            advice = f"did you mean `{name} {near[0]}`?" if near else f"see `{name} --help`"
            ctx.fail(f"no command {args[0]!r}; {advice}")
        return super().resolve_command(ctx, args)
