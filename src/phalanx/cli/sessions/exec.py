"""`phalanx exec` and `phalanx shell`: run a command next to a job's ranks, connected to this terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

import click

from phalanx.cli.command_groups import split_options
from phalanx.cli.completion import JOB_ARGUMENT
from phalanx.cli.connection import connect
from phalanx.cli.jobs.job_lookup import resolve_node
from phalanx.cli.sessions.session_input import InputSender, print_beside, raw_terminal, terminal_size
from phalanx.core.errors import BadRequest

_SHELL: Final = ["/bin/sh", "-c", "command -v bash >/dev/null 2>&1 && exec bash -i; exec sh -i"]
_NODE_RANK = click.option(
    "--node-rank",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Which node of the job; default: the first.",
)


class ExecCommand(click.Command):
    """A command whose options may stand before or behind JOB. Everything from the command to run on is left to it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Move the options that stand behind JOB before it, then parse."""
        before, rest = split_options(self, ctx, args)
        behind, command = split_options(self, ctx, rest[1:])
        return super().parse_args(ctx, [*before, *behind, *rest[:1], *command])


@click.command(name="exec", cls=ExecCommand, context_settings={"allow_interspersed_args": False})
@JOB_ARGUMENT
@click.argument("command", metavar="[--] COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@_NODE_RANK
@click.option(
    "-t", "--tty/--no-tty", default=None, help="Allocate a terminal; default: if stdin and stdout are terminals."
)
def exec_(job: str, command: tuple[str, ...], node_rank: int, tty: bool | None) -> int:
    """Run a command in the environment of a job's ranks, and exit with its exit code."""
    words = command[1:] if command[:1] == ("--",) else command
    if not words:
        raise BadRequest("the command is missing", hint=f"phalanx exec {job} -- nvidia-smi")
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    return run_command(job, words, node_rank=node_rank, tty=interactive if tty is None else tty)


@click.command()
@JOB_ARGUMENT
@_NODE_RANK
@click.option("--new", is_flag=True, help="A new shell, also in a job that has a terminal of its own.")
def shell(job: str, node_rank: int, new: bool) -> int:
    """Open a shell in the environment of a job's ranks; of a job with a terminal, return to that.

    The terminal of a job outlives this command. Ctrl-] three times leaves it.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise BadRequest("shell needs a terminal", hint=f"run one command with phalanx exec {job} -- COMMAND")
    head = connect()
    job_id, named_rank = resolve_node(head, job)
    node_rank = node_rank or named_rank
    found = head.job(job_id).job
    if found.terminal and not node_rank and not new:
        from phalanx.cli.sessions.terminal_session import attach_terminal

        return attach_terminal(head, found.id, idles=found.idle_s is not None)
    return run_command(job, _SHELL, node_rank=node_rank, tty=True)


def run_command(job: str, argv: Sequence[str], *, node_rank: int, tty: bool) -> int:
    """Run a command connected to this terminal; return its exit code."""
    head, size = connect(), terminal_size()
    job_id, named_rank = resolve_node(head, job)
    if tty and head.job(job_id).job.idle_s is not None:
        from phalanx.cli.jobs.idle_notices import print_idle_notices

        print_idle_notices(job_id, print_beside)
    with (
        head.exec(job_id, argv, tty=tty, rows=size[0], cols=size[1], node_rank=node_rank or named_rank) as session,
        raw_terminal(tty),
        InputSender(session, tty=tty),
    ):
        while (data := session.read()) is not None:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
    return session.exit_code or 0
