"""`phalanx drill`: the real control plane through thousands of faults, in virtual time. Needs no head and touches none."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable
from typing import Any, Final

import click

from phalanx.cli.faults import warn

_SEEDS: Final = 100  # about a minute of two cores
_SEEDS_SPAN: Final = 1 << 40  # fresh seeds are drawn below this: short enough to type


@click.command()
@click.option("--seeds", type=click.IntRange(min=1), metavar="N", help=f"How many seeds; {_SEEDS}, or 1 with --seed.")
@click.option("--seed", type=click.IntRange(min=0), metavar="S", help="The first of them; drawn afresh unless said.")
@click.option(
    "--events",
    type=click.IntRange(min=1),
    default=2000,
    show_default=True,
    metavar="E",
    help="Events that changed something, before the faults heal.",
)
@click.option("--processes", type=click.IntRange(min=1), metavar="K", help="How many seeds at once; as many as cores.")
@click.option("--coverage", "with_coverage", is_flag=True, help="Which edges and faults were met, and which were not.")
@click.option("--story", is_flag=True, help="The last lines told of each seed that broke something.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def drill(**asked: Any) -> None:
    """Drill the real controller, supervisors and store with seeded faults, and check every invariant after each event.

    \b
    phalanx drill --seeds 500
    phalanx drill --seed 4711 --story
    """  # noqa: D301  # \b is click's
    from phalanx.simulator.drill.campaign import run_campaign

    first = secrets.randbelow(_SEEDS_SPAN) if asked["seed"] is None else asked["seed"]
    seeds = asked["seeds"] or (_SEEDS if asked["seed"] is None else 1)
    processes = asked["processes"] or os.cpu_count() or 1
    with _progress(seeds, shown=not asked["as_json"]) as done:
        report = run_campaign(first, seeds, events=asked["events"], processes=processes, done=done)
    if asked["as_json"]:
        from phalanx.cli.lists import encoded

        found = report.as_dict() | ({"coverage": report.coverage.as_dict()} if asked["with_coverage"] else {})
        print(encoded(found, indent=2))
    else:
        _print(report, first, with_coverage=asked["with_coverage"])
    for result in report.broken:
        _tell(result, story=asked["story"])
    if report.broken:
        sys.exit(1)


class _progress:  # noqa: N801  # a context manager reads as a verb
    """A bar on standard error, where that is a terminal."""

    def __init__(self, seeds: int, *, shown: bool) -> None:
        self._seeds, self._shown = seeds, shown and sys.stderr.isatty()
        self._bar: Any = None

    def __enter__(self) -> Callable[[Any], None]:
        if not self._shown:
            return lambda _: None
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._bar.start()
        task, broken = self._bar.add_task("seeds", total=self._seeds), 0

        def done(result: Any) -> None:
            nonlocal broken
            broken += bool(result.violations)
            self._bar.update(task, advance=1, description=f"seeds, {broken} broken" if broken else "seeds")

        return done

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _print(report: Any, first: int, *, with_coverage: bool) -> None:
    from phalanx.simulator.drill.edges import UNREACHED, missing, table_of_faults, unlisted

    last = first + report.seeds - 1
    print(
        f"{report.seeds} seeds ({first} to {last}), {report.events:,} events, {report.faults:,} faults of {len(report.by_kind)} kinds"
    )
    print(
        f"{report.on_sqlite} seeds on SQLite and a virtual disk, the others on the memory store; trace {report.trace}"
    )
    print()
    for line in table_of_faults(report.coverage):
        print(line)
    print()
    lacking = missing(report.coverage)
    for kind, (met, names) in lacking.items():
        print(f"{kind}: {met} of {met + len(names)} met" + (f"; not met: {', '.join(names[:6])}" if names else ""))
        for name in names[6:] if with_coverage else ():
            print(f"  not met: {name}")
    for kind, names in unlisted(report.coverage).items() if with_coverage else ():
        print(f"{kind}, met and not listed: {', '.join(names)}")
    for pair, why in UNREACHED.items() if with_coverage else ():
        print(f"never met: {pair}: {why}")
    print()
    broken = sum(len(one.violations) for one in report.broken)
    print(
        f"{broken or 'no'} violation{'' if broken == 1 else 's'} in {report.seconds:.1f} s ({report.cpu_s:.1f} s of CPU)"
    )


def _tell(result: Any, *, story: bool) -> None:
    from phalanx.simulator.drill.seed import replay_command
    from phalanx.simulator.drill.violation import INVARIANTS

    for one in result.violations:
        warn(
            f"seed {result.seed}, event {one.event}: invariant {one.invariant} ({INVARIANTS.get(one.invariant, '')}): {one.text}"
        )
    if story and result.story:
        print(result.story, file=sys.stderr)
    print(f"replay it: {replay_command(result.seed, result.asked)} --story", file=sys.stderr)
