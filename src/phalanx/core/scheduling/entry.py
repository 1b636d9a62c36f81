"""What stands on a board: classes of jobs, jobs, what is decided of them, and who hears of it."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from phalanx.core.scheduling.hazard import Group
from phalanx.core.scheduling.need import Need
from phalanx.core.scheduling.pool import Places

NEVER_S = -1.0


class Verb(enum.Enum):
    """What a decision does to a job."""

    START = "start"
    STOP = "stop"  # preempt: save, stop, wait again
    MOVE = "move"  # save, stop, and go on elsewhere at once


class Because(enum.Enum):
    """By what right a job is stopped or moved."""

    VALUE = "value"  # the other brings more for the same GPUs
    PRIORITY = "priority"  # the other's priority is higher
    RECLAIM = "reclaim"  # the room was borrowed, and its owner wants it back
    OVERDUE = "overdue"  # the other has waited past the bound
    REPAIR = "repair"  # the other lost a node and gets its place back
    SHRINK = "shrink"  # an elastic job gives back what it grew into
    GROW = "grow"  # an elastic job takes idle nodes


@dataclass(slots=True, eq=False)
class Throttle:
    """How many elements of an array may run at once, and do."""

    running_max: int
    running: int = 0


@dataclass(slots=True, eq=False)
class Klass:
    """Jobs alike for every rule: judged once a pass, and explained once.

    Attributes:
        needs: what one of them asks, in order of preference.
        gpus: devices of the first need, at least.
        label: whose history speaks for them; jobs of one label and size end alike.
        rank: priority; higher goes first, whatever else.
        queue: number in the quota tree.
        shut: bitset of nodes closed to them.
    """

    number: int
    needs: tuple[Need, ...]
    gpus: int
    label: int = 0
    rank: int = 0
    queue: int = 0
    user: str = ""
    shut: int = 0
    throttle: Throttle | None = None


@dataclass(slots=True, eq=False)
class Entry:
    """One job as a policy sees it. Mutable, owned by its board.

    Attributes:
        seq: submit order; the last tie-break.
        size_s: what a yardstick policy may know of its whole run time: exact, its limit, or predicted; -1 when unknown.
        attained_s: kept work of earlier runs; the present run adds `now - since_s`.
        since_s: start of the present run; -1 while it waits.
        seen_s: service that it has been seen to live past, though a stop lost some of it.
        saved_s: when it last saved, if it does not save when asked to stop; -1 if it does, so that a stop loses nothing.
        waits_from_s: since when it waits without a break.
        waited_s: waiting before `waits_from_s`.
        places, need: where it runs and as what; empty while it waits.
        stops, moves: preemptions and moves it has borne.
        shield_s: not stopped for another's value before this time.
        moved_s: when it came to where it runs.
        overdue: it has waited past the bound and goes before everyone.
        repair: it lost its place through no fault of its own, and gets it back before newcomers.
        avoid: bitset of nodes to use only if nothing else fits.
        fixed: never stopped for another's sake.
        group: jobs alike, of whose ends a policy learns; the policy's own.
    """

    seq: int
    klass: Klass
    submit_s: float
    gpus: int = 0
    size_s: float = -1.0
    attained_s: float = 0.0
    seen_s: float = 0.0
    since_s: float = NEVER_S
    saved_s: float = NEVER_S
    waits_from_s: float = 0.0
    waited_s: float = 0.0
    places: Places = ()
    need: Need | None = None
    stops: int = 0
    moves: int = 0
    shield_s: float = 0.0
    moved_s: float = 0.0
    overdue: bool = False
    repair: bool = False
    avoid: int = 0
    fixed: bool = False
    group: Group | None = None

    def __post_init__(self) -> None:
        self.gpus = self.klass.gpus

    @property
    def held(self) -> int:
        """Devices it holds."""
        return sum([count for _, count in self.places])

    def on(self, node: int) -> int:
        """Devices it holds on one of its nodes."""
        return next(count for at, count in self.places if at == node)

    def service_s(self, now_s: float) -> float:
        """Kept work so far."""
        return self.attained_s if self.since_s < 0.0 else self.attained_s + (now_s - self.since_s)

    def unsaved_s(self, now_s: float) -> float:
        """Work that a stop now would lose."""
        return 0.0 if self.saved_s < 0.0 or self.since_s < 0.0 else now_s - max(self.since_s, self.saved_s)


@dataclass(frozen=True, slots=True)
class Decision:
    """One line of a pass, in the order taken. `places` is empty for a stop; `other` is the job a stop or move makes room for."""

    verb: Verb
    entry: Entry
    places: Places
    other: Entry | None = None
    because: Because | None = None


class Listener:
    """A policy: it hears of every change, to keep its own order, and decides. Here every method does nothing."""

    def decide(self, now_s: float) -> float | None:
        """Decide on the board; return when to be called again even if nothing happens, or None."""

    def arrived(self, entry: Entry) -> None:
        """The job waits (again)."""

    def adopted(self, entry: Entry) -> None:
        """The job was running before this policy was there."""

    def left_together(self, entries: Sequence[Entry]) -> None:
        """These waiting jobs are gone: cancelled, held, or of another class from now on. All at once, so that each line is gone through once."""

    def ended(self, entry: Entry, now_s: float) -> None:
        """The running job has come to its end; its places are still set."""

    def stopped(self, entry: Entry, now_s: float) -> None:
        """The running job has stopped without an end; its places are still set."""


def by_submit(entries: Iterable[Entry]) -> list[Entry]:
    """In submit order; equal times by seq."""
    return sorted(entries, key=lambda entry: (entry.submit_s, entry.seq))
