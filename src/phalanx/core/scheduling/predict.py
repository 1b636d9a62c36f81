"""How long a job will run, from how long its likes ran: a distribution, never a number, and nothing where nothing is known.

Ended jobs are kept in groups from narrow (same user, queue, name, GPUs and command) to wide (everybody); the narrowest with enough ends
speaks. Its quantiles are those of the next of a row of exchangeable values, so that an interval means what it says at any count:

    of n ends in order, x(1) <= ... <= x(n), the next lies below x(k) with probability k / (n + 1)

Source: H. A. David, H. N. Nagaraja, "Order Statistics" (3rd ed. 2003), sec. 7.2; nothing is assumed of the distribution. A job that has
run for a while is compared with those alone that ran longer.

Users change their ways, and the longest jobs are still running when the others have ended, so that likes are not quite exchangeable. What
was foretold is therefore judged at each end, and the interval widened while more than two of ten fall outside, narrowed while fewer do.
Source: I. Gibbs, E. Candes, "Adaptive Conformal Inference Under Distribution Shift", NeurIPS 2021, eq. 2, for either side by itself.

Called by `why`, dry runs and the simulator's predicted durations.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import QueueId, UserId
from phalanx.core.scheduling.hazard import size_of
from phalanx.core.work.job import Job, JobState

LOW, MIDDLE, HIGH = 0.1, 0.5, 0.9  # what is told: the range that four of five jobs end in
ENDS_ENOUGH: Final = 9  # of so many, smallest and largest are the quantiles LOW and HIGH: n with 1 / (n + 1) = LOW
NEWEST_NARROW: Final = 64  # ends kept of one name: its owner changes it now and then, and the newest tell more
NEWEST_WIDE: Final = 4096  # of users, sizes and all: a few bursts of one user's sweep must not be all that is known
LEARNING: Final = 0.005  # step of the shares' adaptation: what 200 ends miss too often widens by as much as was missed
SHARE_LEAST, SHARE_MOST = 0.01, 0.4  # of a tail, whatever is missed: more than 99 ends for it are rare
GROUPS_MAX: Final = 200_000  # about 100 MB; the group that has not heard of an end for longest goes first
ENDS_ITS_WAY: Final = frozenset(
    {JobState.SUCCEEDED, JobState.FAILED, JobState.TIMEOUT}
)  # a cancel says nothing of how long it would have run
ANY_QUEUE: Final = QueueId("")
_Key = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What is known of a job before it runs. `command`: equal for equal commands; "" and 0 where nothing is known."""

    user: UserId
    gpus: int
    queue: QueueId = ANY_QUEUE
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


class _Group:
    """Run times of the newest ends. Appended to by one thread and read by others: it is never shorter than it was, but by one at a time."""

    __slots__ = ("keep", "newest", "ordered")

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.newest: deque[float] = deque()
        self.ordered: list[float] = []

    def add(self, run_s: float) -> None:
        self.newest.append(run_s)
        insort(self.ordered, run_s)
        if len(self.newest) > self.keep:
            del self.ordered[bisect_left(self.ordered, self.newest.popleft())]


class Predictor:
    """What has been learned of how long jobs run.

    Attributes:
        low, high: shares of the tails as they must be taken among past ends, so that one in ten falls into either.
    """

    def __init__(self) -> None:
        self._groups: dict[_Key, _Group] = {}
        self.low, self.high = LOW, 1.0 - HIGH

    def ended(self, traits: Traits, run_s: float) -> None:
        """A job came to its own end after this service. Cost: one group for each kind of likeness."""
        self._judge(self.predict(traits), run_s)
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
        ordered: list[float] = []
        first, likes = 0, ""
        for key, _, words in _likes(traits):
            group = self._groups.get(key)
            if group is None:
                continue
            ordered, likes = group.ordered, words
            first = bisect_right(ordered, ran_s) if ran_s > 0.0 else 0
            if len(ordered) - first >= ENDS_ENOUGH:
                break
        count = len(ordered) - first
        low, middle, high = (_quantile(ordered, first, count, share) for share in (self.low, MIDDLE, 1.0 - self.high))
        return Prediction(
            p10_s=_bounded(ran_s if low is None else low, run_max_s) or 0.0, p50_s=_bounded(middle, run_max_s),
            p90_s=_bounded(high, run_max_s), ends=count, likes=likes if count else "",
        )  # fmt: skip

    def _judge(self, told: Prediction, run_s: float) -> None:
        if told.p90_s is None:
            return
        self.low = _share(self.low + LEARNING * (LOW - (run_s < told.p10_s)))
        self.high = _share(self.high + LEARNING * (1.0 - HIGH - (run_s > told.p90_s)))


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


def _quantile(ordered: list[float], first: int, count: int, share: float) -> float | None:
    """Of `count` values from `first` on: linear between the neighbours of place `share` x (count + 1).

    Past the outermost, that one; of too few values None, since how far outside it may lie, nobody knows.
    """
    place = share * (count + 1)
    if count < ENDS_ENOUGH and not 1.0 - 1e-9 <= place <= count + 1e-9:
        return None
    place = min(max(place, 1.0), float(count))
    low = int(place + 1e-9)
    below = ordered[first + low - 1]
    return below if low == count else below + (ordered[first + low] - below) * max(0.0, place - low)


def _share(share: float) -> float:
    return min(max(share, SHARE_LEAST), SHARE_MOST)


def _bounded(run_s: float | None, run_max_s: float | None) -> float | None:
    if run_max_s is None:
        return run_s
    return run_max_s if run_s is None else min(run_s, run_max_s)
