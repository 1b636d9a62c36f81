"""Command groups that suggest the nearest subcommand for an unknown one."""

from __future__ import annotations

import click

from phalanx.core.errors import BadRequest
from phalanx.core.work.nearest_match import nearest_match


class CommandGroup(click.Group):
    """A group of subcommands: `phalanx nodes`, `phalanx nodes drain n0`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the subcommand that `args` begin with.

        Raises:
            BadRequest: there is no such subcommand; the hint names the nearest.
        """
        word = args[0] if args else ""
        if word and word not in self.commands and not word.startswith("-"):
            near = nearest_match(word, self.commands)
            hint = f"did you mean {near}?" if near else f"{ctx.command_path} {'|'.join(self.commands)}"
            raise BadRequest(f"no such command {ctx.command_path} {word!r}", hint=hint)
        return super().resolve_command(ctx, args)
