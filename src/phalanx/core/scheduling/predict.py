"""How long a job will run, from how long its likes ran: a distribution, never a number, and nothing where nothing is known.

Ended jobs are kept in groups from narrow (same user, queue, name, GPUs and command) to wide (everybody); the narrowest with enough ends
speaks. Its quantiles are those of the next of a row of exchangeable values, so that an interval means what it says at any count:

    of n ends in order, x(1) <= ... <= x(n), the next lies below x(k) with probability k / (n + 1)

Source: H. A. David, H. N. Nagaraja, "Order Statistics" (3rd ed. 2003), sec. 7.2; nothing is assumed of the distribution. A job that has
run for a while is compared with those alone that ran longer. Called by `why`, dry runs and the simulator's predicted durations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.ids import QueueId, UserId
from phalanx.core.scheduling.hazard import size_of
from phalanx.core.work.job import Job, JobState

LOW, MIDDLE, HIGH = 0.1, 0.5, 0.9  # what is told: the range that four of five jobs end in
ENDS_ENOUGH: Final = 9  # of so many, smallest and largest are the quantiles LOW and HIGH: n with 1 / (n + 1) = LOW
NEWEST_NARROW: Final = 64  # ends kept of one name: its owner changes it now and then, and the newest tell more
NEWEST_WIDE: Final = 1024  # of users, sizes and all: a few bursts of one user's sweep must not be all that is known
GROUPS_MAX: Final = 200_000  # about 100 MB; the group that has not heard of an end for longest goes first
ENDS_ITS_WAY: Final = frozenset(
    {JobState.SUCCEEDED, JobState.FAILED, JobState.TIMEOUT}
)  # a cancel says nothing of how long it would have run
_Key = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What is known of a job before it runs. `command`: equal for equal commands; "" and 0 where nothing is known."""

    user: UserId
    gpus: int
    queue: QueueId = QueueId("")
    name: str = ""
    command: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """How long the job runs in all, in seconds, what it has run included: quantiles.

    Attributes:
        p10_s: one in ten ends sooner; 0 (or what it has run) when too little is known.
        p50_s, p90_s: None when too little is known.
        ends: ended jobs that it comes from; 0 for none.
        likes: what these have in common with it, for people.
    """

    p10_s: float
    p50_s: float | None
    p90_s: float | None
    ends: int = 0
    likes: str = ""


@dataclass(slots=True)
class _Group:
    """Run times of the newest ends. Appended to by one thread and read by others: each step is one of the interpreter's."""

    keep: int
    newest: list[float] = field(default_factory=list)
    ordered: tuple[float, ...] | None = None

    def add(self, run_s: float) -> None:
        self.newest.append(run_s)
        if len(self.newest) >= 2 * self.keep:
            del self.newest[: -self.keep]
        self.ordered = None

    def in_order(self) -> tuple[float, ...]:
        ordered = self.ordered
        if ordered is None:
            ordered = self.ordered = tuple(sorted(self.newest[-self.keep :]))
        return ordered


class Predictor:
    """What has been learned of how long jobs run."""

    def __init__(self) -> None:
        self._groups: dict[_Key, _Group] = {}

    def ended(self, traits: Traits, run_s: float) -> None:
        """A job came to its own end after this service. Cost: one group for each kind of likeness."""
        groups = self._groups
        for key, keep, _ in _likes(traits):
            group = groups.pop(key, None) or _Group(keep)
            group.add(run_s)
            groups[key] = group  # newest last
        while len(groups) > GROUPS_MAX:
            del groups[next(iter(groups))]

    def predict(self, traits: Traits, *, ran_s: float = 0.0, run_max_s: float | None = None) -> Prediction:
        """How long the job runs in all.

        Args:
            traits: of the job.
            ran_s: what it has run; it will run longer.
            run_max_s: it is stopped then, by its time limit; None for no limit.
        """
        longer: tuple[float, ...] = ()
        words = ""
        for key, _, words in _likes(traits):  # noqa: B007  # the last words are needed
            group = self._groups.get(key)
            longer = () if group is None else _above(group.in_order(), ran_s)
            if len(longer) >= ENDS_ENOUGH:
                break
        low, middle, high = (_quantile(longer, share) for share in (LOW, MIDDLE, HIGH))
        return Prediction(
            p10_s=_bounded(ran_s if len(longer) < ENDS_ENOUGH or low is None else low, run_max_s) or 0.0,
            p50_s=_bounded(middle, run_max_s), p90_s=_bounded(high, run_max_s), ends=len(longer), likes=words if longer else "",
        )  # fmt: skip


def traits_of(job: Job) -> Traits:
    """What is known of a job before it runs."""
    role = job.spec.role
    return Traits(
        user=job.user, queue=job.queue, name=job.spec.name, gpus=role.gpus.total, command=hash((role.argv, role.script))
    )


def _likes(traits: Traits) -> Iterator[tuple[_Key, int, str]]:
    """The groups that a job belongs to, narrow ones first: key, ends kept, and what its members have in common."""
    user, name, gpus = traits.user, traits.name, traits.gpus
    if name:
        yield (
            (user, name, gpus, traits.queue, traits.command),
            NEWEST_NARROW,
            f"of {user} called {name}, with this command and {gpus} GPUs",
        )
        yield (user, name, gpus), NEWEST_NARROW, f"of {user} called {name} with {gpus} GPUs"
        yield (user, name), NEWEST_NARROW, f"of {user} called {name}"
    yield (user, gpus), NEWEST_WIDE, f"of {user} with {gpus} GPUs"
    yield (user,), NEWEST_WIDE, f"of {user}"
    yield (size_of(max(1, gpus)),), NEWEST_WIDE, "of about this many GPUs"
    yield (), NEWEST_WIDE, "of everybody"


def _above(ordered: tuple[float, ...], ran_s: float) -> tuple[float, ...]:
    """Those that ran longer. `bisect` would need the list; a group is short."""
    return ordered if not ordered or ordered[0] > ran_s else tuple(run_s for run_s in ordered if run_s > ran_s)


def _quantile(ordered: tuple[float, ...], share: float) -> float | None:
    """Linear between the neighbours of place `share` x (n + 1); None past the largest: how far it may lie, nobody knows."""
    place = share * (len(ordered) + 1)
    low = math.floor(place + 1e-9)
    if not ordered or low > len(ordered) or (low == len(ordered) and place > low + 1e-9):
        return None
    if low < 1:
        return None
    if low == len(ordered):
        return ordered[-1]
    return ordered[low - 1] + (ordered[low] - ordered[low - 1]) * (place - low)


def _bounded(run_s: float | None, run_max_s: float | None) -> float | None:
    if run_max_s is None:
        return run_s
    return run_max_s if run_s is None else min(run_s, run_max_s)
