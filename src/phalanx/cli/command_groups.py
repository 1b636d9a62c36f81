"""Command groups: they suggest the nearest subcommand for an unknown one, and most print a list if called without one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import click

from phalanx.cli.connection import connect
from phalanx.cli.list_output import ListView, list_options, show_list
from phalanx.core.errors import BadRequest, Conflict
from phalanx.core.work.nearest_match import suggestion

if TYPE_CHECKING:
    from phalanx.client import Client


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
            hint = suggestion(word, self.commands, f"{ctx.command_path} {'|'.join(self.commands)}")
            raise BadRequest(f"no such command {ctx.command_path} {word!r}", hint=hint)
        return super().resolve_command(ctx, args)


def list_group(
    help: str,  # noqa: A002 - as click names it
    *,
    subcommand: str = "list",
) -> Callable[[Callable[[Client, float], ListView]], CommandGroup]:
    """Make a group of a function that fetches a list from the head at a Unix time.

    The group without a subcommand and its subcommand of this name print the list. The docstring of the function is the help of the latter.
    """

    def make(fetch: Callable[[Client, float], ListView]) -> CommandGroup:
        def print_list(as_json: bool, watch: bool) -> None:
            head = connect()
            show_list(lambda: fetch(head, time.time()), as_json=as_json, watch=watch)

        @click.group(fetch.__name__, cls=CommandGroup, help=help, invoke_without_command=True)
        @list_options
        @click.pass_context
        def group(context: click.Context, as_json: bool, watch: bool) -> None:
            if context.invoked_subcommand is None:
                print_list(as_json, watch)

        group.command(subcommand, help=fetch.__doc__)(list_options(print_list))
        return group

    return make


def check_exists(kind: str, name: str, known: Iterable[str]) -> None:
    """Check that a user, project or queue exists, so that a typo does not create a new one.

    Raises:
        BadRequest: it does not; the hint names the nearest.
    """
    names = list(known)
    if name not in names:
        hint = suggestion(name, names, f"add it with phalanx {kind}s add {name}")
        raise BadRequest(f"no {kind} {name!r}", hint=hint)


def check_new(kind: str, name: str, known: Iterable[str], *, hint: str = "") -> None:
    """Check that a user, project, queue or pool does not exist yet. `hint`: where no command changes one.

    Raises:
        Conflict: it does.
    """
    if name in known:
        raise Conflict(f"{kind} {name} exists already", hint=hint or f"change it with phalanx {kind}s set {name}")


def split_options(command: click.Command, ctx: click.Context, words: list[str]) -> tuple[list[str], list[str]]:
    """Split the words before the first one that is no option of the command, and no value of one."""
    options = [param for param in command.get_params(ctx) if isinstance(param, click.Option)]
    with_value = {name for option in options if not (option.is_flag or option.count) for name in option.opts}
    place = 0
    while place < len(words) and words[place].startswith("-") and words[place] != "--":
        place += 2 if words[place] in with_value else 1
    return words[:place], words[place:]
