"""The records on a board: classes of jobs, jobs and decisions; and the listener that the board reports changes to."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from phalanx.core.resources import NO_RESOURCES, Extras, Resources
from phalanx.core.scheduling.estimates.hazard_table import SimilarJobs
from phalanx.core.scheduling.needs import Need, Places
from phalanx.core.scheduling.sharing.mig_devices import HeldSlices
from phalanx.core.scheduling.sharing.shared_devices import SharedDevice
from phalanx.core.work.pace import StatedEnd
from phalanx.core.work.share import MILLI_PER_DEVICE

NEVER_S = -1.0


class DecisionKind(enum.Enum):
    """The kind of a decision."""

    START = "start"
    STOP = "stop"  # preempt: save, stop, wait again
    MOVE = "move"  # save, stop, and continue elsewhere at once


class StopReason(enum.Enum):
    """The reason for which a job is stopped or moved."""

    VALUE = "value"  # the other job has more value for the same GPUs
    PRIORITY = "priority"  # the other job has a higher priority
    RECLAIM = "reclaim"  # the GPUs were borrowed, and their owner reclaims them
    OVERDUE = "overdue"  # the other job has waited past its limit
    REPAIR = "repair"  # the other job lost a node and gets its place back
    SHRINK = "shrink"  # an elastic job shrinks
    GROW = "grow"  # an elastic job takes idle nodes
    FASTER = "faster"  # it runs faster elsewhere
    SWAP = "swap"  # another job gains more from these GPUs than this one loses
    HOME = "home"  # it leaves nodes that cost money for free ones of the own fleet
    MAKESPAN = "makespan"  # so that the last of all jobs ends earlier


@dataclass(slots=True, eq=False)
class ArrayThrottle:
    """The limit of running elements of an array, and their number."""

    running_max: int
    running: int = 0


@dataclass(slots=True, eq=False)
class JobClass:
    """A class of jobs that are equal for every rule: considered once per pass, and explained once.

    Attributes:
        needs: alternatives, in order of preference.
        gpus: devices of the first need, at least; a share counts as one.
        asked: everything that the smallest need takes, a share as what it is: for quotas.
        uneven_needs: its needs hold different numbers of devices, so that a quota may admit only some of them.
        label: key of the run time statistics; jobs of one label and size have similar run times.
        rank: priority; a higher one always goes first.
        queue: number in the quota tree.
        excluded: bitset of nodes that its jobs may not use.
        speeds: its speed on each kind, as a share of the fastest; empty if equal on all, or not known well enough to move a job.
        may_move: it is faster on one of the kinds that it accepts than on another, and that is sure.
        guessed_kinds: kinds on which its speed is not known well enough to move a running job to or from them.
        licences: seats of licences that each of its jobs needs.
        min_stay_s: least time between two moves of one of its jobs, as its queue has it; None: none is set.
    """

    number: int
    needs: tuple[Need, ...]
    gpus: int
    asked: Resources
    label: int = 0
    rank: int = 0
    queue: int = 0
    user: str = ""
    excluded: int = 0
    throttle: ArrayThrottle | None = None
    speeds: tuple[float, ...] = ()
    uneven_needs: bool = False
    guessed_kinds: frozenset[int] = frozenset()
    may_move: bool = False
    licences: Extras = ()
    min_stay_s: float | None = None

    @property
    def milli(self) -> int:
        """Thousandths of devices of the smallest need."""
        return self.asked.milli


@dataclass(slots=True, eq=False)
class JobEntry:
    """One job as a policy sees it. Mutable, owned by its board.

    Attributes:
        seq: submit order; the last tie-break.
        gpus: devices of the first need of its class; of a job with uneven needs that runs, those of its need.
        size_s: what a reference policy knows of its total run time: exact, its limit, or predicted; -1 if unknown.
        attained_s: saved work of earlier runs; the current run adds `now - since_s`.
        started_s: start of the current run; -1 while it waits.
        service_max_s: the longest service it has reached, including work lost by a stop.
        saved_s: when it last saved, if it does not save when asked to stop; -1 if it does, so that a stop loses nothing.
        waiting_since_s: start of the current wait.
        places, need: where it runs, and for which need; empty while it waits.
        held: everything that it holds while it runs.
        shared_devices: the device of each place that it has a share of, or its MIG slices there; empty for whole devices.
        stops, moves: number of its preemptions and moves.
        protected_until_s: not stopped by value before this time.
        placed_s: when it started or moved to its places.
        overdue: it has waited past its limit and goes before all other jobs.
        lost_nodes: it lost its place through no fault of its own, and gets one before new jobs.
        avoided_nodes: bitset of nodes to use only if nothing else fits.
        data: keys of the datasets that its nodes copy before the start.
        never_stopped: never stopped for another job.
        stated_end: when it ends by its own progress, in service; None if it does not say.
        similar_jobs: similar jobs that a policy learns from; owned by the policy.
    """

    seq: int
    job_class: JobClass
    submit_s: float
    gpus: int = 0
    size_s: float = -1.0
    attained_s: float = 0.0
    service_max_s: float = 0.0
    started_s: float = NEVER_S
    saved_s: float = NEVER_S
    waiting_since_s: float = 0.0
    places: Places = ()
    need: Need | None = None
    held: Resources = NO_RESOURCES
    shared_devices: tuple[SharedDevice | HeldSlices, ...] = ()
    stops: int = 0
    moves: int = 0
    protected_until_s: float = 0.0
    placed_s: float = 0.0
    overdue: bool = False
    lost_nodes: bool = False
    avoided_nodes: int = 0
    data: tuple[str, ...] = ()
    never_stopped: bool = False
    stated_end: StatedEnd | None = None
    similar_jobs: SimilarJobs | None = None

    def __post_init__(self) -> None:
        self.gpus = self.job_class.gpus

    @property
    def devices_held(self) -> int:
        """Whole devices in use."""
        return sum([count for _, count in self.places])

    @property
    def milli_held(self) -> int:
        """Thousandths of devices in use."""
        return self.held.milli

    def resources_on(self, need: Need, places: Places) -> Resources:
        """Everything that the job holds on these places; it holds fewer devices if one became unhealthy."""
        devices = sum([count for _, count in places])
        milli = len(places) * need.share_milli if need.share_milli else devices * MILLI_PER_DEVICE
        asked = self.job_class.asked
        if milli == asked.milli and self.job_class.needs == (need,):
            return asked
        return need.resources_of(len(places), milli)

    def speed_on(self, kind: int) -> float:
        """Its speed on devices of this kind, as a share of its fastest."""
        return self.job_class.speeds[kind] if self.job_class.speeds else 1.0

    def devices_on(self, node: int) -> int:
        """Whole devices in use on one of its nodes."""
        return next(count for at, count in self.places if at == node)

    @property
    def may_shrink(self) -> bool:
        """Whether it is elastic and runs on several nodes."""
        return self.need is not None and self.need.nodes_max > 0 and len(self.places) > 1

    def service_s(self, now_s: float) -> float:
        """Saved work so far."""
        return self.attained_s if self.started_s < 0.0 else self.attained_s + (now_s - self.started_s)

    def unsaved_s(self, now_s: float) -> float:
        """Work that a stop now would lose."""
        return 0.0 if self.saved_s < 0.0 or self.started_s < 0.0 else now_s - max(self.started_s, self.saved_s)


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision, in the order taken. `places` is empty for a stop; `beneficiary` is the job that a stop or move makes room for.

    `speedup`: of a move, the new speed as a multiple of the old one.
    """

    kind: DecisionKind
    entry: JobEntry
    places: Places
    beneficiary: JobEntry | None = None
    reason: StopReason | None = None
    speedup: float = 1.0


class BoardListener:
    """Is notified of every change of a board that it did not decide itself, so that it can maintain its order. Here every method does nothing."""

    def on_waiting(self, entry: JobEntry) -> None:
        """The job waits, for the first time or again."""

    def on_adopted(self, entry: JobEntry) -> None:
        """The job was already running when this board was made; `placed_s` is set."""

    def on_withdrawn(self, entries: Sequence[JobEntry]) -> None:
        """These waiting jobs are gone: cancelled, held, or moved to another class. Passed together, so that each line is scanned once."""

    def on_ended(self, entry: JobEntry, now_s: float) -> None:
        """The running job ended by itself; its places are still set."""

    def on_stopped(self, entry: JobEntry, now_s: float) -> None:
        """The running job was stopped; its places are still set."""


def sorted_by_submit(entries: Iterable[JobEntry]) -> list[JobEntry]:
    """By submit time, then seq."""
    return sorted(entries, key=lambda entry: (entry.submit_s, entry.seq))
