"""`phalanx`: the table of commands. The module of a command is imported only when that command runs; `--help` imports none."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from phalanx import __version__
from phalanx.cli.errors import EXIT_BROKEN_PIPE, report_exception
from phalanx.core.errors import BadRequest

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

COMPLETE_VARIABLE: Final = "_PHALANX_COMPLETE"  # set by the scripts of `phalanx completion`; click reads it


class CommandEntry(NamedTuple):
    """Location of a command ("module:attribute") and its line in `--help`."""

    location: str
    summary: str


SECTIONS: Final[dict[str, dict[str, CommandEntry]]] = {
    "Jobs": {
        "run": CommandEntry("phalanx.cli.jobs.run:run", "Run a command or job file and follow it."),
        "submit": CommandEntry("phalanx.cli.jobs.submit:submit", "Submit a command or job file and return."),
        "rerun": CommandEntry("phalanx.cli.jobs.rerun:rerun", "Submit a job again, with other values if asked."),
        "import": CommandEntry(
            "phalanx.cli.jobs.import_job:import_",
            "Make a job file of a task of SkyPilot or dstack, or of a batch script.",
        ),
        "sweep": CommandEntry(
            "phalanx.cli.sweep.command:sweep", "Search parameters by many jobs, and stop the bad ones early."
        ),
        "ps": CommandEntry("phalanx.cli.jobs.ps:ps", "List jobs with their progress, and why they wait."),
        "why": CommandEntry(
            "phalanx.cli.jobs.why:why", "Explain why a job waits, until when, and what would start it now."
        ),
        "show": CommandEntry(
            "phalanx.cli.jobs.show:show_", "Show one job (history, attempts, ranks, usage) or one service."
        ),
        "usage": CommandEntry("phalanx.cli.jobs.usage:usage", "Show what one job used, and advice for its next run."),
        "logs": CommandEntry("phalanx.cli.jobs.logs:logs", "Print or follow the output of a job."),
        "get": CommandEntry(
            "phalanx.cli.transfers.get:get", "Download the files that a job wrote to PHALANX_OUTPUT_DIR."
        ),
        "attach": CommandEntry("phalanx.cli.jobs.attach:attach", "Follow the output of a job again."),
        "exec": CommandEntry("phalanx.cli.sessions.exec:exec_", "Run a command next to a job's ranks."),
        "shell": CommandEntry("phalanx.cli.sessions.exec:shell", "Open a shell next to a job's ranks."),
        "dev": CommandEntry("phalanx.cli.sessions.dev:dev", "Start a session to work in, or return to it."),
        "port-forward": CommandEntry("phalanx.cli.sessions.port_forward:port_forward", "Reach ports of a job here."),
        "ssh": CommandEntry("phalanx.cli.sessions.ssh:ssh", "Connect to a job by SSH, without an open port."),
        "proxy": CommandEntry("phalanx.cli.sessions.ssh:proxy", "Carry SSH to a job: the ProxyCommand of ssh."),
        "update": CommandEntry(
            "phalanx.cli.jobs.job_actions:update", "Change a job, or roll out another revision of a service."
        ),
        "serve": CommandEntry(
            "phalanx.cli.serve.command:serve", "Services: start, change, roll back and stop them; serve a model."
        ),
        "chat": CommandEntry("phalanx.cli.serve.chat:chat", "Talk with the model of a service."),
        "scale": CommandEntry("phalanx.cli.serve.services:scale", "Set the number of replicas of a service."),
        "sleep": CommandEntry("phalanx.cli.serve.services:sleep", "Let replicas of a service free their GPUs."),
        "wake": CommandEntry("phalanx.cli.serve.services:wake", "Wake sleeping replicas of a service."),
        "cancel": CommandEntry("phalanx.cli.jobs.job_actions:cancel", "Cancel jobs, or stop services."),
        "hold": CommandEntry("phalanx.cli.jobs.job_actions:hold", "Hold waiting jobs, so that they do not start."),
        "release": CommandEntry("phalanx.cli.jobs.job_actions:release", "Release held jobs."),
        "park": CommandEntry(
            "phalanx.cli.jobs.job_actions:park", "Stop jobs after a checkpoint, and keep them without GPUs."
        ),
        "resume": CommandEntry("phalanx.cli.jobs.job_actions:resume", "Queue parked jobs again."),
        "requeue": CommandEntry(
            "phalanx.cli.jobs.job_actions:requeue", "Stop running jobs after a checkpoint, and queue them again."
        ),
    },
    "Cluster": {
        "up": CommandEntry("phalanx.cli.cluster.up:up", "Start a cluster on this machine."),
        "join": CommandEntry("phalanx.cli.cluster.join:join", "Make this server a node of a head on another machine."),
        "relay": CommandEntry(
            "phalanx.cli.cluster.relay:relay", "Carry connections to a head that has no public address."
        ),
        "down": CommandEntry("phalanx.cli.cluster.down:down", "Stop the head of this machine."),
        "heads": CommandEntry("phalanx.cli.cluster.heads:heads", "List the heads: leader and standbys."),
        "nodes": CommandEntry("phalanx.cli.cluster.nodes:nodes", "List, show, drain, undrain or remove nodes."),
        "clouds": CommandEntry(
            "phalanx.cli.cluster.clouds:clouds", "Check what the head may do at a cloud, before a pool uses it."
        ),
        "pools": CommandEntry(
            "phalanx.cli.cluster.pools:pools", "List, add, show or remove pools of nodes that start on demand."
        ),
        "licences": CommandEntry(
            "phalanx.cli.cluster.licences:licences", "List, set or remove licences that the whole fleet shares."
        ),
        "rules": CommandEntry("phalanx.cli.cluster.rules:rules", "Show and set failure rules."),
        "topology": CommandEntry(
            "phalanx.cli.topology.topology:topology", "Show the network topology with free capacity."
        ),
        "top": CommandEntry("phalanx.cli.top.command:top", "Show devices and jobs live."),
        "dashboard": CommandEntry(
            "phalanx.cli.cluster.dashboard:dashboard", "Open the dashboard in a browser, by a link that works once."
        ),
        "gateway": CommandEntry(
            "phalanx.cli.serve.gateway:gateway", "Serve all services at one address, with OpenAI's API."
        ),
        "monitoring": CommandEntry(
            "phalanx.cli.monitoring.command:monitoring", "Rules, a board and settings for Prometheus and Grafana."
        ),
        "waste": CommandEntry("phalanx.cli.report.waste:waste", "List who wastes GPUs now, and what mends it."),
        "report": CommandEntry(
            "phalanx.cli.report.command:report", "Report what the GPUs of the fleet were used for and cost."
        ),
        "prices": CommandEntry("phalanx.cli.report.prices:prices", "List, set or refresh the prices of GPUs."),
        "plan": CommandEntry(
            "phalanx.cli.plan.command:plan",
            "Estimate fit, best layout, training time and cost of a model.",
        ),
        "calibrate": CommandEntry(
            "phalanx.cli.plan.calibrate:calibrate", "Measure this fleet, so that plans use its real performance."
        ),
        "backup": CommandEntry("phalanx.cli.cluster.backup:backup", "Save all records of the head in one file."),
        "restore": CommandEntry(
            "phalanx.cli.cluster.backup:restore", "Restore the records, also into another database."
        ),
        "channels": CommandEntry(
            "phalanx.cli.cluster.channels:channels", "List, add, test or remove channels for messages."
        ),
        "clean": CommandEntry(
            "phalanx.cli.cluster.retention:clean", "Remove logs, outputs and checkpoints of jobs that ended long ago."
        ),
        "retention": CommandEntry(
            "phalanx.cli.cluster.retention:retention", "Show and set how long files of ended jobs are kept."
        ),
        "archives": CommandEntry("phalanx.cli.cluster.retention:archives", "Jobs whose records are in archives."),
        "doctor": CommandEntry(
            "phalanx.cli.cluster.doctor:doctor", "Check this machine and its head, and suggest fixes."
        ),
        "simulate": CommandEntry(
            "phalanx.cli.simulate.command:simulate",
            "Replay a job trace in virtual time, and compare policies.",
        ),
        "whatif": CommandEntry(
            "phalanx.cli.simulate.whatif:whatif", "Replay past jobs with another fleet, quota or policy."
        ),
        "drill": CommandEntry(
            "phalanx.cli.simulate.drill:drill", "Test the control plane with thousands of faults in virtual time."
        ),
        "demo": CommandEntry(
            "phalanx.cli.demo.command:demo", "Demo: a cluster, a training job, a killed node, in 90 seconds."
        ),
    },
    "Access": {
        "queues": CommandEntry("phalanx.cli.access.queues:queues", "Queues, their quotas and their limits."),
        "projects": CommandEntry("phalanx.cli.access.projects:projects", "Accounting groups and their members."),
        "users": CommandEntry("phalanx.cli.access.users:users", "Users and their roles."),
        "secrets": CommandEntry(
            "phalanx.cli.access.secrets:secrets", "Secrets of jobs: list, set, remove them; change their key."
        ),
        "tokens": CommandEntry("phalanx.cli.access.tokens:tokens", "API tokens."),
        "sign-in": CommandEntry(
            "phalanx.cli.access.sign_in:sign_in", "Sign-in at a provider (OpenID Connect), and what its groups give."
        ),
        "login": CommandEntry("phalanx.cli.access.login:login", "Sign in, and save the token with the cluster."),
        "config": CommandEntry("phalanx.cli.access.config:config", "Saved clusters, and which of them commands use."),
        "audit": CommandEntry("phalanx.cli.access.audit:audit", "Audit trail: who changed what; verify it."),
        "slurm-env": CommandEntry(
            "phalanx.cli.slurm_views.environment:slurm_env", "Make sbatch, squeue ... views of Phalanx in this shell."
        ),
        "completion": CommandEntry("phalanx.cli.completion:completion", "Print the completion script of a shell."),
        "version": CommandEntry("phalanx.cli.cluster.version:version", "Print the versions of command and head."),
    },
}
OF_THIS_MACHINE: Final = frozenset({"up", "down", "join", "doctor", "backup", "restore", "demo"})
"""They do not use the current cluster of `config use`, only one that is given by name."""
MAKES_CLUSTERS: Final = frozenset({"login", "config"})
COMMANDS: Final = {name: verb for section in SECTIONS.values() for name, verb in section.items()}


class LazyGroup(click.Group):
    """Looks a command up in the table and imports only that one."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        """Return all commands in the order of `--help`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  # click's signature
        """Import and return the command; None for an unknown name."""
        verb = COMMANDS.get(cmd_name)
        if verb is None:
            return None
        module, _, attribute = verb.location.partition(":")
        found = getattr(importlib.import_module(module), attribute)
        assert isinstance(found, click.Command), verb.location
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that `args` begin with.

        Raises:
            BadRequest: there is no such command; the hint names the nearest.
        """
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise unknown_command(args[0], COMMANDS, "phalanx --help lists all commands")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands and options that begin so; imports no command."""
        from click.shell_completion import CompletionItem

        found = [
            CompletionItem(name, help=verb.summary) for name, verb in COMMANDS.items() if name.startswith(incomplete)
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  # click's signature
        """Write the sections of the table; imports nothing."""
        for section, verbs in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(name, verb.summary) for name, verb in verbs.items()], col_max=12)


def unknown_command(word: str, known: Sequence[str] | dict[str, CommandEntry], otherwise: str) -> BadRequest:
    """Return the error for an unknown command, with the nearest known one."""
    from phalanx.cli.slurm_views.verbs import VERBS
    from phalanx.core.work.nearest_match import suggestion

    if word in VERBS:
        return BadRequest(
            f"{word} is a command of Slurm; here it is `{VERBS[word]}`",
            hint='eval "$(phalanx slurm-env)" makes sbatch, squeue and their kin views in this shell',
        )
    return BadRequest(f"no such command {word!r}", hint=suggestion(word, known, otherwise))


EPILOG: Final = """\b
First steps:
  phalanx up                                  start a cluster on this machine
  phalanx run --gpus 2 -- python train.py     run a job on it
  phalanx ps                                  list jobs and their progress

Exit codes: that of the job for run, attach and --wait; 64 usage, 69 head unreachable, 75 try later, 77 not permitted, 78 bad file,
124 wait timed out."""


@click.command(
    cls=LazyGroup,
    epilog=EPILOG,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.option("--url", metavar="URL", help="URL of the head, instead of the one of this machine.")
@click.option("--cluster", metavar="NAME", help="Saved cluster to use (phalanx config).")
@click.option("--insecure", is_flag=True, help="Send the token over plain HTTP to another machine.")
@click.option("--debug", is_flag=True, help="Show tracebacks (anywhere before --).")
@click.version_option(__version__, message="phalanx %(version)s")
@click.pass_context
def phalanx(context: click.Context, url: str | None, cluster: str | None, insecure: bool, debug: bool) -> None:
    """Phalanx runs training jobs on a cluster of GPU servers."""
    del debug  # removed from the arguments before click parses them
    if cluster and url:
        raise click.UsageError("--url and --cluster contradict each other; give one of the two")
    cluster = cluster or os.environ.get("PHALANX_CLUSTER")
    if url:
        if not url.isprintable():
            raise click.UsageError(f"--url {ascii(url)[:100]} is not a URL; example: https://10.0.0.5:7600")
        os.environ["PHALANX_URL"] = url
        os.environ["PHALANX_CLUSTER"] = ""
    elif cluster:
        os.environ["PHALANX_CLUSTER"] = cluster
        if context.invoked_subcommand not in MAKES_CLUSTERS:
            from phalanx.client.connection.clusters import read_clusters

            os.environ["PHALANX_URL"] = read_clusters().require(cluster).url
    elif context.invoked_subcommand in OF_THIS_MACHINE:
        os.environ.setdefault("PHALANX_CLUSTER", "")
    if insecure:
        os.environ["PHALANX_INSECURE"] = "1"
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. Raises nothing."""
    _open_closed_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    ours = words[: words.index("--")] if "--" in words else words
    debug = "--debug" in ours or bool(os.environ.get("PHALANX_DEBUG"))
    words = [word for word in ours if word != "--debug"] + words[len(ours) :]
    try:
        code = phalanx.main(args=words, prog_name="phalanx", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except SystemExit as ended:  # with standalone_mode=False click exits only on EPIPE, and after it completed a line
        return int(ended.code or 0) if COMPLETE_VARIABLE in os.environ else EXIT_BROKEN_PIPE
    except (Exception, KeyboardInterrupt) as fault:  # noqa: BLE001  # the only place where errors become messages
        return report_exception(fault, debug=debug)


def _open_closed_streams() -> None:
    """Open /dev/null for standard streams that were closed (`>&-`), so that no file or connection gets their descriptors."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        fd = os.open(os.devnull, os.O_RDWR)
        if fd != number:
            os.dup2(fd, number)
            os.close(fd)
        setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115  # open until the process ends
