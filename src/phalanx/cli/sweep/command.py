"""`phalanx sweep`: starts or resumes a sweep and follows it; `show` and `list` read it."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Final

import click

from phalanx.cli.command_groups import CommandGroup
from phalanx.cli.connection import FOLLOW_PATIENCE_S, connect
from phalanx.cli.jobs.request.job_options import job_options
from phalanx.cli.list_output import to_json
from phalanx.cli.sweep.parameter_options import ParameterCommand
from phalanx.core.errors import BadRequest, Conflict, NotFound
from phalanx.sweep.definition import METRICS, SEARCHES

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.core.work.spec import Role
    from phalanx.sweep.definition import SweepDefinition

_START: Final = "start"
_POLL_S: Final = 0.3
"""Between two turns: a stopped trial frees its GPU within 2 s of its report, and a turn costs the head one list."""
_LEFT: Final = 130  # exit code after Ctrl-C, as of a shell


class SweepGroup(CommandGroup):
    """The group; without the name of a subcommand, `start` is meant."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert `start` where no subcommand is named."""
        helped = len(args) == 1 and args[0] in self.get_help_option_names(ctx)
        if not helped and (not args or args[0] not in self.commands):
            args = [_START, *args]
        return super().parse_args(ctx, args)


@click.group(cls=SweepGroup)
def sweep() -> None:
    """Search parameters by many jobs, and stop the bad ones early.

    Without a subcommand, `start` is meant; `phalanx sweep start --help` lists its options.

    \b
    phalanx sweep --lr log:1e-5..1e-2 --layers 2,4 --samples 20 --stop asha --gpus 1 -- python train.py
    phalanx sweep sweep.yaml
    phalanx sweep --resume NAME
    """  # noqa: D301 - click reads the backspace character itself


@sweep.command(_START, cls=ParameterCommand)
@job_options
@click.option("--samples", type=click.IntRange(1, 10_000), metavar="N", help="Number of trials; default: 20.")
@click.option("--search", type=click.Choice(SEARCHES), help="How values are chosen; default: random.")
@click.option("--metric", type=click.Choice(METRICS), help="What trials report; default: loss.")
@click.option("--stop", type=click.Choice(["asha", "none"]), help="Stop bad trials early; default: none.")
@click.option("--minimize", "goal", flag_value="minimize", help="The lowest value is the best (default).")
@click.option("--maximize", "goal", flag_value="maximize", help="The highest value is the best.")
@click.option("--min-steps", type=int, metavar="N", help="First step at which ASHA compares; default: 1/27 of a trial.")
@click.option("--eta", type=int, metavar="N", help="ASHA lets one of N trials go on; default: 3.")
@click.option("--max-parallel", type=int, metavar="N", help="Trials at once; default: as many as the GPUs hold.")
@click.option("--seed", type=int, metavar="N", help="The same seed gives the same trials; default: 0.")
@click.option("--resume", metavar="NAME", help="Go on with a sweep whose command has ended.")
@click.option("--plot", metavar="FILE", help="Draw the trials at the end: .svg, .png or .html.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line for each event.")
@click.pass_context
def start(context: click.Context, /, resume: str | None, plot: str | None, as_json: bool, **given: Any) -> int:
    """Start a sweep, and follow it to its end.

    A range is LOW..HIGH or log:LOW..HIGH (for a grid with :N, the number of values), a list is A,B,C. The values replace {NAME} in the
    command, or are added to it as --NAME=VALUE, and are in the variables SWEEP_NAME of each parameter.
    """
    from phalanx.cli.sweep.picture import check_picture

    if plot is not None:
        check_picture(plot)
    head = connect(FOLLOW_PATIENCE_S)
    if resume is not None:
        from phalanx.sweep.definition import read_definition

        if given["file"] or context.args or any(value for value in given.values()):
            raise BadRequest("--resume takes no other options", hint=f"phalanx sweep --resume {resume}")
        definition = read_definition(resume)
    else:
        definition = _new_definition(head, context, given)
    return _follow(head, definition, plot=plot, as_json=as_json)


@sweep.command()
@click.argument("name")
@click.option("--plot", metavar="FILE", help="Draw the trials: .svg, .png or .html.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(name: str, plot: str | None, as_json: bool) -> None:
    """Show the trials of a sweep, and the best of them."""
    from phalanx.cli.sweep.picture import check_picture, draw_sweep
    from phalanx.cli.sweep.screen import sweep_lines, sweep_value
    from phalanx.cli.terminal import terminal
    from phalanx.sweep.definition import journal_path, read_definition
    from phalanx.sweep.study import read_trials
    from phalanx.sweep.trial_jobs import ClusterTrialJobs

    if plot is not None:
        check_picture(plot)
    definition = read_definition(name)
    trials = read_trials(definition, journal_path(name))
    jobs = ClusterTrialJobs(connect(), definition).look([one.job_id for one in trials if one.job_id])
    if as_json:
        print(to_json(sweep_value(definition, trials, jobs), indent=2))
    else:
        print("\n".join(sweep_lines(definition, trials, jobs, terminal())))
    if plot is not None:
        print(draw_sweep(definition, trials, plot), file=sys.stderr)


@sweep.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_sweeps(as_json: bool) -> None:
    """List the sweeps that were started here, newest first."""
    from phalanx.sweep.definition import sweep_names

    names = sweep_names()
    print(to_json(names, indent=2) if as_json else "\n".join(names) or "no sweep was started here")


def _new_definition(head: Client, context: click.Context, given: dict[str, Any]) -> SweepDefinition:
    """Return the definition to work on: a new one, or the stored one if the same command was given before."""
    import msgspec

    from phalanx.cli.jobs.request.sendable_job import sendable_mapping
    from phalanx.cli.sweep.sweep_request import sweep_request
    from phalanx.sweep.definition import read_definition

    made, wanted = sweep_request(context, given)
    seen = head.overview()
    job = {**sendable_mapping(head, wanted), **{key: made.job[key] for key in ("grace",) if key in made.job}}
    parallel = made.max_parallel or _fitting(sum(len(one.devices) for one in seen.nodes), wanted.spec.role)
    made = msgspec.structs.replace(made, job=job, head_id=seen.head_id, max_parallel=parallel)
    try:
        before = read_definition(made.name)
    except NotFound:
        return made
    if not before.describes_same(made):
        raise Conflict(f"the sweep {made.name} exists and differs from this one", hint="give another --name")
    return before


def _fitting(devices: int, role: Role) -> int:
    """Return how many trials the devices of the fleet hold; at least one."""
    return max(1, 1000 * devices // role.milli) if role.milli else max(1, devices)


def _follow(head: Client, definition: SweepDefinition, *, plot: str | None, as_json: bool) -> int:
    from phalanx.cli.sweep.picture import draw_sweep
    from phalanx.cli.sweep.screen import SweepScreen, best_lines
    from phalanx.sweep.definition import journal_path, locked_sweep, read_definition, write_definition
    from phalanx.sweep.driver import SweepDriver, best_trial
    from phalanx.sweep.study import SweepStudy
    from phalanx.sweep.trial_jobs import ClusterTrialJobs

    if definition.head_id != (here := head.overview().head_id):
        raise Conflict(f"the sweep {definition.name} runs on the head {definition.head_id}; this is {here}")
    with locked_sweep(definition.name):
        try:
            definition = read_definition(definition.name)
        except NotFound:
            write_definition(definition)
        study = SweepStudy(definition, journal_path(definition.name))
        driver = SweepDriver(definition, study, ClusterTrialJobs(head, definition))
        screen = SweepScreen(definition, as_json=as_json)
        try:
            with screen:
                while not driver.done:
                    screen.update(driver.turn(time.time()), study.trials(), driver.seen)
                    if not driver.done:
                        time.sleep(_POLL_S)
        except KeyboardInterrupt:
            print(f"left; live trials go on. next: phalanx sweep --resume {definition.name}", file=sys.stderr)
            return _LEFT
        trials = study.trials()
    if as_json:
        best = best_trial(trials, maximize=definition.maximize)
        print(to_json({"kind": "ended", "sweep": definition.name, "best": best}, indent=0))
    else:
        print("\n".join([*screen.table(trials, driver.seen), *best_lines(definition, trials)]))
    if plot is not None:
        print(draw_sweep(definition, trials, plot), file=sys.stderr)
    return 0 if best_trial(trials, maximize=definition.maximize) else 1
