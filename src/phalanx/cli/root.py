"""`phalanx`: the table of verbs. A verb's module is imported when the verb is typed; `--help` needs none of them."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Final, NamedTuple

import click

from phalanx import __version__
from phalanx.cli.faults import NO_READER, ended_by
from phalanx.core.errors import BadRequest
from phalanx.core.work.nearest import nearest


class Verb(NamedTuple):
    """Where a verb lives ("module:attribute") and its line in `--help`."""

    place: str
    line: str


SECTIONS: Final[dict[str, dict[str, Verb]]] = {
    "Jobs": {
        "run": Verb("phalanx.cli.jobs.run:run", "Run a command or job file and stay with it."),
        "submit": Verb("phalanx.cli.jobs.submit:submit", "Hand in a command or job file and go on."),
        "ps": Verb("phalanx.cli.jobs.ps:ps", "List jobs: how far they are, and why one waits."),
        "why": Verb("phalanx.cli.jobs.why:why", "Why a job waits, until when, and what would start it now."),
        "show": Verb("phalanx.cli.jobs.show:show_", "All about one job: story, attempts, ranks, checkpoints, receipt."),
        "logs": Verb("phalanx.cli.jobs.logs:logs", "Print or follow the output of a job."),
        "get": Verb("phalanx.cli.jobs.get:get", "Fetch the files a job put into PHALANX_OUTPUT_DIR."),
        "attach": Verb("phalanx.cli.jobs.attach:attach", "Come back to a job and stream its output."),
        "exec": Verb("phalanx.cli.jobs.exec:exec_", "Run a command beside a job's ranks."),
        "shell": Verb("phalanx.cli.jobs.exec:shell", "Open a shell beside a job's ranks."),
        "update": Verb("phalanx.cli.jobs.change:update", "Change name, priority, time or queue of a job."),
        "cancel": Verb("phalanx.cli.jobs.change:cancel", "End jobs for good."),
        "hold": Verb("phalanx.cli.jobs.change:hold", "Keep waiting jobs from starting."),
        "release": Verb("phalanx.cli.jobs.change:release", "Let held jobs start."),
        "requeue": Verb("phalanx.cli.jobs.change:requeue", "Stop running jobs, after saving, and let them wait again."),
    },
    "Cluster": {
        "up": Verb("phalanx.cli.cluster.up:up", "Bring a cluster up on this machine."),
        "join": Verb("phalanx.cli.cluster.join:join", "Make this server a node of a head elsewhere."),
        "down": Verb("phalanx.cli.cluster.down:down", "Stop it."),
        "heads": Verb("phalanx.cli.cluster.heads:heads", "Which head leads, and which stand by."),
        "nodes": Verb("phalanx.cli.cluster.nodes:nodes", "List nodes; show, drain, undrain or forget them."),
        "rules": Verb("phalanx.cli.cluster.rules:rules", "What a failure means and what is done about it."),
        "topology": Verb("phalanx.cli.cluster.topology:topology", "Draw the network's tree and what is free in it."),
        "top": Verb("phalanx.cli.top.command:top", "Watch devices and jobs, live."),
        "plan": Verb(
            "phalanx.cli.plan.command:plan",
            "Whether a model fits, its best layout, how long it trains and what it costs.",
        ),
        "calibrate": Verb(
            "phalanx.cli.plan.calibrate:calibrate", "Measure this fleet, so that plans count with what it gives."
        ),
        "backup": Verb("phalanx.cli.cluster.backup:backup", "Save all records of the head in one file."),
        "restore": Verb("phalanx.cli.cluster.backup:restore", "Bring them back, also into another database."),
        "doctor": Verb("phalanx.cli.cluster.doctor:doctor", "Check this machine and say what to mend."),
        "simulate": Verb(
            "phalanx.cli.simulate.command:simulate",
            "Replay a trace of jobs in virtual time: waits, utilisation, policies compared.",
        ),
        "whatif": Verb(
            "phalanx.cli.simulate.whatif:whatif", "Replay the past on another fleet, quota or policy, side by side."
        ),
        "drill": Verb(
            "phalanx.cli.simulate.drill:drill", "The control plane through thousands of faults, in virtual time."
        ),
        "demo": Verb("phalanx.cli.demo.command:demo", "A cluster, a real training job, a killed node: in 90 seconds."),
    },
    "Access": {
        "queues": Verb("phalanx.cli.access.queues:queues", "Where jobs wait."),
        "projects": Verb("phalanx.cli.access.projects:projects", "Who pays."),
        "users": Verb("phalanx.cli.access.users:users", "Who may do what."),
        "tokens": Verb("phalanx.cli.access.tokens:tokens", "Keys to the head."),
        "audit": Verb("phalanx.cli.access.audit:audit", "Who changed what, and whether that record is whole."),
        "version": Verb("phalanx.cli.cluster.version:version", "Print the version, and the head's."),
    },
}
VERBS: Final = {name: verb for section in SECTIONS.values() for name, verb in section.items()}


class LazyGroup(click.Group):
    """Looks a verb up in the table and imports only that."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        """All verbs, as `--help` lists them."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  # click's signature
        """The verb's command, imported now; None for an unknown one."""
        verb = VERBS.get(cmd_name)
        if verb is None:
            return None
        module, _, attribute = verb.place.partition(":")
        found = getattr(importlib.import_module(module), attribute)
        assert isinstance(found, click.Command), verb.place
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that `args` begin with.

        Raises:
            BadRequest: there is none; names the nearest.
        """
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            raise unknown_verb(args[0], VERBS, "phalanx --help lists them")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  # click's signature
        """The sections of the table; imports nothing."""
        for section, verbs in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(name, verb.line) for name, verb in verbs.items()], col_max=12)


def unknown_verb(word: str, known: Sequence[str] | dict[str, Verb], otherwise: str) -> BadRequest:
    """The refusal of a word that is no verb, with the nearest one."""
    near = nearest(word, known)
    return BadRequest(f"no such command {word!r}", hint=f"did you mean {near}?" if near else otherwise)


EPILOG: Final = """\b
First steps:
  phalanx up                                    a cluster on this machine
  phalanx run --gpus 2 -- python train.py       a job on it
  phalanx ps                                    how it goes

Exit codes: the job's own from run, attach and --wait; 64 usage, 69 head unreachable, 75 try later, 77 not permitted, 78 bad file,
124 wait timed out."""


@click.command(
    cls=LazyGroup,
    epilog=EPILOG,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.option("--url", metavar="URL", help="The head to speak to, instead of the one of this machine.")
@click.option("--debug", is_flag=True, help="Show the traceback of a fault (anywhere before --).")
@click.version_option(__version__, message="phalanx %(version)s")
@click.pass_context
def phalanx(context: click.Context, url: str | None, debug: bool) -> None:
    """Phalanx turns a pile of GPU servers into one computer."""
    del debug  # taken from the words before click sees them
    if url:
        if not url.isprintable():
            raise click.UsageError(f"--url {ascii(url)[:100]} is no URL; one looks like http://127.0.0.1:7600")
        os.environ["PHALANX_URL"] = url
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and give its exit code. Raises nothing."""
    _open_closed_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    ours = words[: words.index("--")] if "--" in words else words
    debug = "--debug" in ours or bool(os.environ.get("PHALANX_DEBUG"))
    words = [word for word in ours if word != "--debug"] + words[len(ours) :]
    try:
        code = phalanx.main(args=words, prog_name="phalanx", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except SystemExit:  # click's answer to a reader that went away (EPIPE); it ends by itself in no other case
        return NO_READER
    except (Exception, KeyboardInterrupt) as fault:  # noqa: BLE001  # the one place where every fault becomes a line
        return ended_by(fault, debug=debug)


def _open_closed_streams() -> None:
    """A stream that was closed before we began (`>&-`) leads to nowhere; no file or connection may take its number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        fd = os.open(os.devnull, os.O_RDWR)
        if fd != number:
            os.dup2(fd, number)
            os.close(fd)
        setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115  # open as long as we run
