"""What a planted bug is: a small patch of the code under drill, and which invariant of DESIGN 3 has to notice it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import pytest

from phalanx.simulator.drill import run_seed
from phalanx.simulator.drill.seed_run import SeedResult

Plant = Callable[[pytest.MonkeyPatch], None]
SEEDS_MORE: Final = 15  # past the first: which seed meets a bug changes with any change of the scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """One planted bug.

    Attributes:
        name: of the function that plants it.
        breaks: what is wrong then, in a sentence.
        invariant: the one that must be reported first, by its number.
        seed: the first that is drilled.
        events: counted ones in each seed.
        sqlite: whether on the SQLite store; None for what the seed says.
        services: whether users have services beside their jobs.
        mig: whether MIG divides devices, and users want slices.
        resources: whether jobs ask for CPUs, extras and licences too.
        pools: whether there is a node pool.
        plant: patches the code.
    """

    name: str
    breaks: str
    invariant: int
    seed: int
    events: int
    sqlite: bool | None
    services: bool
    mig: bool
    resources: bool
    pools: bool
    plant: Plant

    def run(self, seed: int) -> SeedResult:
        """Drill one seed as this bug is drilled."""
        return run_seed(
            seed,
            events=self.events,
            sqlite=self.sqlite,
            services=self.services,
            mig=self.mig,
            resources=self.resources,
            pools=self.pools,
        )


BUGS: Final[list[Bug]] = []


def planted(
    invariant: int,
    *,
    seed: int,
    events: int = 600,
    sqlite: bool | None = None,
    services: bool = False,
    mig: bool = False,
    resources: bool = False,
    pools: bool = False,
) -> Callable[[Plant], Plant]:
    """Enter the function into the list; its docstring says what it breaks."""

    def enter(plant: Plant) -> Plant:
        breaks = (plant.__doc__ or "").strip()
        BUGS.append(
            Bug(
                name=plant.__name__,
                breaks=breaks,
                invariant=invariant,
                seed=seed,
                events=events,
                sqlite=sqlite,
                services=services,
                mig=mig,
                resources=resources,
                pools=pools,
                plant=plant,
            )
        )
        return plant

    return enter
