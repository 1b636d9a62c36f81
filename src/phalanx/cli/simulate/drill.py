"""`phalanx drill`: run the real control plane through seeded faults in virtual time. Needs no head and contacts none."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import click

from phalanx.cli.errors import warn
from phalanx.core.errors import BadRequest

if TYPE_CHECKING:
    from phalanx.simulator.drill.campaign import DrillReport
    from phalanx.simulator.drill.seed_run import SeedResult

KINDS: Final = ("services", "mig", "resources", "pools")  # of drills
_SEEDS: Final = 100  # about a minute of two cores
_SEEDS_SPAN: Final = 1 << 40  # random seeds stay below this, short enough to type


@click.command()
@click.option(
    "--seeds", type=click.IntRange(min=1), metavar="N", help=f"Number of seeds. [default: {_SEEDS}, or 1 with --seed]"
)
@click.option("--seed", type=click.IntRange(min=0), metavar="S", help="First seed. [default: random]")
@click.option(
    "--events",
    type=click.IntRange(min=1),
    default=2000,
    show_default=True,
    metavar="E",
    help="State changes before the faults are healed.",
)
@click.option(
    "--processes", type=click.IntRange(min=1), metavar="K", help="Seeds to run in parallel. [default: number of cores]"
)
@click.option(
    "--coverage",
    "with_coverage",
    is_flag=True,
    help="Show which state transitions and faults occurred, and which did not.",
)
@click.option("--services", is_flag=True, help="Users have services beside their jobs.")
@click.option("--mig", is_flag=True, help="MIG divides devices, and users want slices.")
@click.option("--resources", is_flag=True, help="Jobs ask for CPUs, extras and licences too, and queues limit these.")
@click.option("--pools", is_flag=True, help="A node pool, whose provider fails, is late or does not answer.")
@click.option("--story", is_flag=True, help="Show the last events of each failed seed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def drill(**options: Any) -> None:
    """Run the real controller, supervisors and store with seeded faults, and check every invariant after each event.

    \b
    phalanx drill --seeds 500
    phalanx drill --seed 4711 --story
    """  # noqa: D301  # \b is a click marker
    from phalanx.simulator.drill.campaign import run_campaign

    if sum(options[kind] for kind in KINDS) > 1:
        raise BadRequest(
            "--services, --mig, --resources and --pools cannot be combined", hint="run one after the other"
        )
    first = secrets.randbelow(_SEEDS_SPAN) if options["seed"] is None else options["seed"]
    seeds = options["seeds"] or (_SEEDS if options["seed"] is None else 1)
    processes = options["processes"] or os.cpu_count() or 1
    with _SeedProgress(seeds, shown=not options["as_json"]) as done:
        report = run_campaign(
            first,
            seeds,
            events=options["events"],
            services=options["services"],
            mig=options["mig"],
            resources=options["resources"],
            pools=options["pools"],
            processes=processes,
            on_result=done,
        )
    if options["as_json"]:
        from phalanx.cli.list_output import to_json

        found = report.as_dict() | ({"coverage": report.coverage.as_dict()} if options["with_coverage"] else {})
        print(to_json(found, indent=2))
    else:
        _print(report, first, with_coverage=options["with_coverage"])
    for result in report.failed_seeds:
        users = {kind: options[kind] for kind in KINDS}
        _print_violations(result, history=options["story"], users=users)
    if report.failed_seeds:
        sys.exit(1)


class _SeedProgress:
    """A progress bar on standard error if it is a terminal."""

    def __init__(self, seeds: int, *, shown: bool) -> None:
        self._seeds, self._shown = seeds, shown and sys.stderr.isatty()
        self._bar: Any = None

    def __enter__(self) -> Callable[[SeedResult], None]:
        if not self._shown:
            return lambda _: None
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._bar.start()
        task, broken = self._bar.add_task("seeds", total=self._seeds), 0

        def done(result: SeedResult) -> None:
            nonlocal broken
            broken += bool(result.violations)
            self._bar.update(task, advance=1, description=f"seeds, {broken} failed" if broken else "seeds")

        return done

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _print(report: DrillReport, first: int, *, with_coverage: bool) -> None:
    from phalanx.simulator.drill.expected_transitions import (
        UNREACHABLE_PAIRS,
        fault_table,
        uncovered,
        unlisted_transitions,
    )

    last = first + report.seeds - 1
    print(
        f"{report.seeds} seeds ({first} to {last}), {report.events:,} events, {report.faults:,} faults of {len(report.by_kind)} kinds"
    )
    print(
        f"{report.on_sqlite} seeds on SQLite and a virtual disk, the rest on the memory store; trace hash {report.trace}"
    )
    print()
    for line in fault_table(report.coverage):
        print(line)
    print()
    for kind, (met, names) in uncovered(report.coverage).items():
        print(
            f"{kind}: {met} of {met + len(names)} covered" + (f"; not covered: {', '.join(names[:6])}" if names else "")
        )
        for name in names[6:] if with_coverage else ():
            print(f"  not covered: {name}")
    for kind, names in unlisted_transitions(report.coverage).items() if with_coverage else ():
        print(f"{kind}, covered but not listed: {', '.join(names)}")
    for pair, why in UNREACHABLE_PAIRS.items() if with_coverage else ():
        print(f"unreachable: {pair}: {why}")
    print()
    broken = sum(len(one.violations) for one in report.failed_seeds)
    print(
        f"{broken or 'no'} violation{'' if broken == 1 else 's'} in {report.wall_s:.1f} s ({report.cpu_s:.1f} s of CPU)"
    )


def _print_violations(result: SeedResult, *, history: bool, users: Mapping[str, bool]) -> None:
    from phalanx.simulator.drill.seed_run import replay_command
    from phalanx.simulator.drill.violations import INVARIANTS

    for one in result.violations:
        warn(
            f"seed {result.seed}, event {one.event}: invariant {one.invariant} ({INVARIANTS.get(one.invariant, '')}): {one.text}"
        )
    if history and result.history:
        print(result.history, file=sys.stderr)
    again = replay_command(result.seed, result.events_requested, **users)
    print(f"reproduce with: {again} --story", file=sys.stderr)
