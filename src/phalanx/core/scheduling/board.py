"""The persistent index a policy decides on: what runs, what waits, what is free. Deltas in, decisions out.

The controller and the simulator keep one board each and tell it what happened (arrived, ended, node left, node back); a policy's
`decide` calls `start`, `stop` and `move`, which change the board at once and note the decision. Whoever keeps the board carries the
decisions out, or takes back what the newest state refuses (`undo_start`). Nothing here is rebuilt per cycle: a pass costs what changed.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from phalanx.core.scheduling.hazard import Group
from phalanx.core.scheduling.pool import Places, Pool

NEVER_S = -1.0


class Verb(enum.Enum):
    """What a decision does to a job."""

    START = "start"
    STOP = "stop"  # preempt: save, stop, wait again
    MOVE = "move"  # save, stop, and go on elsewhere at once


@dataclass(slots=True)
class Entry:
    """One job as a policy sees it. Mutable, owned by its board.

    Attributes:
        seq: submit order; the last tie-break.
        label: number of its queue.
        size_s: what a yardstick policy may know of its whole run time: exact, its limit, or predicted; -1 when unknown.
        attained_s: kept work of earlier runs; the present run adds `now - since_s`.
        since_s: start of the present run; -1 while it waits.
        waits_from_s: since when it waits without a break.
        waited_s: waiting before `waits_from_s`.
        places: where it runs; empty while it waits.
        stops, moves: preemptions and moves it has borne.
        shield_s: not stopped before this time.
        moved_s: when it came to where it runs.
        overdue: it has waited past the bound and goes before everyone.
        group: jobs alike, of whose ends the policy learns.
    """

    seq: int
    gpus: int
    label: int
    submit_s: float
    size_s: float = -1.0
    attained_s: float = 0.0
    since_s: float = NEVER_S
    waits_from_s: float = 0.0
    waited_s: float = 0.0
    places: Places = ()
    stops: int = 0
    moves: int = 0
    shield_s: float = 0.0
    moved_s: float = 0.0
    overdue: bool = False
    group: Group | None = None

    def service_s(self, now_s: float) -> float:
        """Kept work so far."""
        return self.attained_s if self.since_s < 0.0 else self.attained_s + (now_s - self.since_s)


@dataclass(frozen=True, slots=True)
class Decision:
    """One line of a pass, in the order taken. `places` is empty for a stop; `because` is the job a stop or move makes room for."""

    verb: Verb
    entry: Entry
    places: Places
    because: Entry | None = None


class Listener:
    """A policy: it hears of every change, to keep its own order, and decides. Here every method does nothing."""

    def decide(self, now_s: float) -> float | None:
        """Decide on the board; return when to be called again even if nothing happens, or None."""

    def arrived(self, entry: Entry) -> None:
        """The job waits for the first time, or was taken back from a refused start."""

    def left(self, entry: Entry) -> None:
        """The waiting job is gone: cancelled or held."""

    def ended(self, entry: Entry, now_s: float) -> None:
        """The running job has ended; its places are still set."""


class Board:
    """Jobs and room of one pool.

    Attributes:
        restart_cost_s: work a preemption or a move costs the job: its restart and what it had not saved.
        waiting, running: by seq.
        down: nodes that left and are not back.
    """

    __slots__ = ("_listener", "decisions", "down", "here", "pool", "restart_cost_s", "running", "waiting")

    def __init__(self, sizes: Sequence[int], *, restart_cost_s: float = 60.0) -> None:
        self.pool = Pool(sizes)
        self.restart_cost_s = restart_cost_s
        self.waiting: dict[int, Entry] = {}
        self.running: dict[int, Entry] = {}
        self.here: list[list[Entry]] = [[] for _ in sizes]  # entries with devices on each node
        self.decisions: list[Decision] = []
        self.down: set[int] = set()
        self._listener = Listener()

    def listen(self, listener: Listener) -> None:
        """Tell `listener` of every later change."""
        self._listener = listener

    def arrive(self, entry: Entry) -> None:
        """A job waits."""
        entry.waits_from_s = entry.submit_s
        self.waiting[entry.seq] = entry
        self._listener.arrived(entry)

    def withdraw(self, entry: Entry) -> None:
        """A waiting job is gone."""
        del self.waiting[entry.seq]
        self._listener.left(entry)

    def end(self, entry: Entry, now_s: float) -> None:
        """A running job has ended."""
        del self.running[entry.seq]
        self._listener.ended(entry, now_s)
        self._release(entry)

    def start(self, entry: Entry, places: Places, now_s: float) -> None:
        """Decide a start. The policy takes the entry out of its own order itself."""
        del self.waiting[entry.seq]
        self.running[entry.seq] = entry
        entry.waited_s += now_s - entry.waits_from_s
        entry.since_s = now_s
        self._hold(entry, places)
        self.decisions.append(Decision(Verb.START, entry, places))

    def stop(self, entry: Entry, now_s: float, because: Entry | None = None) -> None:
        """Decide a preemption: the job loses its room and the restart cost, and waits again."""
        del self.running[entry.seq]
        entry.attained_s += now_s - entry.since_s - self.restart_cost_s
        entry.since_s = NEVER_S
        entry.waits_from_s = now_s
        entry.stops += 1
        self._release(entry)
        self.waiting[entry.seq] = entry
        self.decisions.append(Decision(Verb.STOP, entry, (), because))

    def move(self, entry: Entry, places: Places, because: Entry | None = None) -> None:
        """Decide a move: the job goes on elsewhere and loses the restart cost."""
        entry.attained_s -= self.restart_cost_s
        entry.moves += 1
        self._release(entry)
        self._hold(entry, places)
        self.decisions.append(Decision(Verb.MOVE, entry, places, because))

    def drain(self) -> list[Decision]:
        """Hand over the decisions since the last call."""
        taken = self.decisions
        self.decisions = []
        return taken

    def undo_start(self, entry: Entry) -> None:
        """The newest state refused the start: the job waits as before."""
        del self.running[entry.seq]
        self._release(entry)
        entry.waited_s -= entry.since_s - entry.waits_from_s
        entry.since_s = NEVER_S
        self.waiting[entry.seq] = entry
        self._listener.arrived(entry)

    def node_left(self, node: int) -> None:
        """No new work on the node."""
        self.down.add(node)
        self.pool.leave(node)

    def node_back(self, node: int) -> None:
        """The node takes work again."""
        self.down.discard(node)
        self.pool.back(node)

    def _hold(self, entry: Entry, places: Places) -> None:
        entry.places = places
        self.pool.take(places)
        for node, _ in places:
            self.here[node].append(entry)

    def _release(self, entry: Entry) -> None:
        self.pool.give(entry.places)
        for node, _ in entry.places:
            self.here[node].remove(entry)
        entry.places = ()


def by_submit(entries: Iterable[Entry]) -> list[Entry]:
    """In submit order; equal times by seq."""
    return sorted(entries, key=lambda entry: (entry.submit_s, entry.seq))
