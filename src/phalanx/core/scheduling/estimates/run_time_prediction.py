"""Predicts how long a job will run, from the run times of similar jobs: a distribution, or no prediction without enough data.

Run times of ended jobs are kept in groups from narrow (same user, queue, name, GPUs and command) to wide (all jobs); the narrowest group
with enough data is used. Its quantiles are those of the next value of an exchangeable sequence, so that an interval has its stated
probability for any number of values:

    of n values in order, x(1) <= ... <= x(n), the next lies below x(k) with probability k / (n + 1)

Source: H. A. David, H. N. Nagaraja, "Order Statistics" (3rd ed. 2003), sec. 7.2; distribution-free. A job that has run for a while is
compared only with jobs that ran longer.

Users change their habits, and the longest jobs are still running when others have ended, so similar jobs are not quite exchangeable.
Predictions are therefore evaluated at each end, and the interval widens while more than two of ten run times fall outside, and narrows
while fewer do. Source: I. Gibbs, E. Candes, "Adaptive Conformal Inference Under Distribution Shift", NeurIPS 2021, eq. 2, for either side.

Used by `why`, dry runs and the simulator's predicted durations.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import QueueId, UserId
from phalanx.core.scheduling.estimates.hazard_table import size_of
from phalanx.core.work.job import Job
from phalanx.core.work.states import JobState

LOW_QUANTILE, MEDIAN_QUANTILE, HIGH_QUANTILE = 0.1, 0.5, 0.9  # the reported range, in which four of five jobs end
ENDS_MIN: Final = 9  # with this many, smallest and largest are the quantiles LOW and HIGH: n with 1 / (n + 1) = LOW
ENDS_KEPT_PER_NAME: Final = (
    64  # ends kept per name: its owner changes it now and then, and the newest are the most relevant
)
ENDS_KEPT_WIDE: Final = 4096  # per user, size and in total: more than a few bursts of one user's sweep
LEARNING_RATE: Final = (
    0.005  # step of the adaptation: over 200 ends, a tail that is missed too often widens by the excess
)
TAIL_SHARE_MIN, TAIL_SHARE_MAX = 0.01, 0.4  # bounds of a tail's share: more than 99 ends for it are rare
GROUPS_MAX: Final = 200_000  # about 100 MB; the least recently updated group is dropped first
INFORMATIVE_END_STATES: Final = frozenset(
    {JobState.SUCCEEDED, JobState.FAILED, JobState.TIMEOUT}
)  # the run time of a cancelled job is unknown
ANY_QUEUE: Final = QueueId("")
_Key = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTraits:
    """What is known of a job before it runs. `command`: equal for equal commands; "" and 0 if unknown."""

    user: UserId
    gpus: int
    queue: QueueId = ANY_QUEUE
    name: str = ""
    command: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimePrediction:
    """The total run time of the job in seconds, including what it has run: quantiles.

    Attributes:
        p10_s: one in ten ends sooner; 0 (or what it has run) if there is too little data.
        p50_s, p90_s: None if there is too little data.
        sample_count: number of ended jobs that it is based on; 0 for none.
        similarity: what these have in common with it, for users.
    """

    p10_s: float
    p50_s: float | None
    p90_s: float | None
    sample_count: int = 0
    similarity: str = ""


class _Group:
    """Run times of the newest ends. Appended to by one thread and read by others: its length never shrinks by more than one."""

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


class RunTimePredictor:
    """Statistics of how long jobs run.

    Attributes:
        low, high: shares of the tails to use among past ends, so that one in ten falls into either.
    """

    def __init__(self) -> None:
        self._groups: dict[_Key, _Group] = {}
        self.low, self.high = LOW_QUANTILE, 1.0 - HIGH_QUANTILE

    def record_end(self, traits: JobTraits, run_s: float) -> None:
        """A job ended by itself after this service. Cost: one group for each level of similarity."""
        self._adapt(self.predict(traits), run_s)
        groups = self._groups
        for key, keep, _ in _similar_groups(traits):
            group = groups.pop(key, None) or _Group(keep)
            group.add(run_s)
            groups[key] = group  # newest last
        while len(groups) > GROUPS_MAX:
            del groups[next(iter(groups))]

    def predict(self, traits: JobTraits, *, ran_s: float = 0.0, run_max_s: float | None = None) -> RunTimePrediction:
        """The total run time of the job.

        Args:
            traits: of the job.
            ran_s: what it has run; it will run longer.
            run_max_s: its time limit, at which it is stopped; None for no limit.
        """
        ordered: list[float] = []
        first, likes = 0, ""
        for key, _, words in _similar_groups(traits):
            group = self._groups.get(key)
            if group is None:
                continue
            ordered, likes = group.ordered, words
            first = bisect_right(ordered, ran_s) if ran_s > 0.0 else 0
            if len(ordered) - first >= ENDS_MIN:
                break
        count = len(ordered) - first
        low, middle, high = (
            _quantile(ordered, first, count, share) for share in (self.low, MEDIAN_QUANTILE, 1.0 - self.high)
        )
        return RunTimePrediction(
            p10_s=_limited(ran_s if low is None else low, run_max_s) or 0.0,
            p50_s=_limited(middle, run_max_s),
            p90_s=_limited(high, run_max_s),
            sample_count=count,
            similarity=likes if count else "",
        )

    def _adapt(self, predicted: RunTimePrediction, run_s: float) -> None:
        if predicted.p90_s is None:
            return
        self.low = _clamped(self.low + LEARNING_RATE * (LOW_QUANTILE - (run_s < predicted.p10_s)))
        self.high = _clamped(self.high + LEARNING_RATE * (1.0 - HIGH_QUANTILE - (run_s > predicted.p90_s)))


def traits_of(job: Job) -> JobTraits:
    """What is known of a job before it runs."""
    role = job.spec.role
    return JobTraits(
        user=job.user, queue=job.queue, name=job.spec.name, gpus=role.gpus.total, command=hash((role.argv, role.script))
    )


def _similar_groups(traits: JobTraits) -> Iterator[tuple[_Key, int, str]]:
    """The groups that a job belongs to, narrow ones first: key, ends kept, and what its members have in common."""
    user, name, gpus = traits.user, traits.name, traits.gpus
    if name:
        yield (
            (user, name, gpus, traits.queue, traits.command),
            ENDS_KEPT_PER_NAME,
            f"of {user} named {name}, with this command and {gpus} GPUs",
        )
        yield (user, name, gpus), ENDS_KEPT_PER_NAME, f"of {user} named {name} with {gpus} GPUs"
        yield (user, name), ENDS_KEPT_PER_NAME, f"of {user} named {name}"
    yield (user, gpus), ENDS_KEPT_WIDE, f"of {user} with {gpus} GPUs"
    yield (user,), ENDS_KEPT_WIDE, f"of {user}"
    yield (size_of(max(1, gpus)),), ENDS_KEPT_WIDE, "of a similar number of GPUs"
    yield (), ENDS_KEPT_WIDE, "of all users"


def _quantile(ordered: list[float], first: int, count: int, share: float) -> float | None:
    """Of `count` values from `first` on: linear interpolation at position `share` x (count + 1).

    Beyond the outermost value, that value; None with too few values, since the distance beyond it is unknown.
    """
    place = share * (count + 1)
    if count < ENDS_MIN and not 1.0 - 1e-9 <= place <= count + 1e-9:
        return None
    place = min(max(place, 1.0), float(count))
    low = int(place + 1e-9)
    below = ordered[first + low - 1]
    return below if low == count else below + (ordered[first + low] - below) * max(0.0, place - low)


def _clamped(share: float) -> float:
    return min(max(share, TAIL_SHARE_MIN), TAIL_SHARE_MAX)


def _limited(run_s: float | None, run_max_s: float | None) -> float | None:
    if run_max_s is None:
        return run_s
    return run_max_s if run_s is None else min(run_s, run_max_s)
