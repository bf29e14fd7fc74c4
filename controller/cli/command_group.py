"""Command group for verbs with subcommands (`fs weights push`). Suggests the nearest name for an unknown subcommand."""

from __future__ import annotations

import click


class CommandGroup(click.Group):
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
