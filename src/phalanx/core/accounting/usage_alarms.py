"""Spells of waste: which job or node wastes GPUs, since when, how much so far, and whether that is an alarm. Pure; time is an argument.

A spell begins with the state and ends when the state was absent for PAUSE_S: so a short burst of activity neither restarts the time to the
alarm, nor ends an alarm that would soon begin again. An alarm begins when its spell is as long as its threshold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

from phalanx.core.ids import JobId, NodeId
from phalanx.core.work.job import Job
from phalanx.core.work.usage.waste_terms import WasteKind

PAUSE_S: Final = 60.0  # a spell survives so long without its state
PAUSE_PART: Final = 0.1  # but at most this part of its threshold, so that a short threshold is not met by a pause
_HOUR_US: Final = 3_600_000_000  # of a GPU-hour
S = TypeVar("S")


class WastedPart(NamedTuple):
    """A part of a device: thousandths, and since when it is wasted (Unix milliseconds)."""

    milli: int
    since_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WasteSighting:
    """What one job or node wastes at one time.

    Attributes:
        job: that wastes; None for devices of a node that no job holds, or that are broken.
        nodes: on which; one if there is no job.
        parts: that are wasted.
        held_milli: thousandths that the job holds in all; of a node, what it has.
        model: of the first device.
        node_gpus: of a job, the devices of the smallest of its nodes; 0 if unknown.
        holders: of a node, the jobs on it, the one with the least first.
        why: of a broken node, what is known.
        down, cordoned: the broken node is.
    """

    kind: WasteKind
    job: Job | None
    nodes: tuple[NodeId, ...]
    parts: tuple[WastedPart, ...]
    held_milli: int
    model: str = ""
    node_gpus: int = 0
    holders: tuple[JobId, ...] = ()
    why: str = ""
    down: bool = False
    cordoned: bool = False

    @property
    def key(self) -> tuple[WasteKind, str]:
        """Identifies the spell."""
        return self.kind, self.nodes[0] if self.job is None else self.job.id

    @property
    def milli(self) -> int:
        """Thousandths of a device that are wasted."""
        return sum(part.milli for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spell(Generic[S]):
    """A time of waste that lasts. Times are Unix milliseconds.

    Attributes:
        newest: what was seen of it last.
        after_ms: threshold of its alarm.
        lost: GPU-microseconds so far.
    """

    newest: S
    since_ms: int
    seen_ms: int
    after_ms: int
    lost: int = 0

    @property
    def alarmed(self) -> bool:
        """Whether it is an alarm."""
        return self.seen_ms - self.since_ms >= self.after_ms

    @property
    def gpu_hours(self) -> float:
        """GPU-hours so far."""
        return self.lost / _HOUR_US

    def survives(self, now_ms: int) -> bool:
        """Whether it goes on although its state is absent now."""
        return now_ms - self.seen_ms <= min(PAUSE_S * 1000, PAUSE_PART * self.after_ms)


class Seen(NamedTuple, Generic[S]):
    """One subject of spells at one time."""

    key: Hashable
    value: S
    parts: tuple[WastedPart, ...]
    after_s: float


class SpellTracker(Generic[S]):
    """The spells that last, by key. `begun`: alarms that began, for each key's word."""

    def __init__(self, word: Callable[[S], str]) -> None:
        self.begun: Counter[str] = Counter()
        self._word = word
        self._spells: dict[Hashable, Spell[S]] = {}
        self._counted_ms = 0

    def update(self, seen: Iterable[Seen[S]], now_ms: int) -> tuple[Spell[S], ...]:
        """Take everything that is seen now, and return the spells that last, those with the most lost first."""
        before, self._spells = self._spells, {}
        for one in seen:
            known = before.pop(one.key, None)
            since_ms = known.since_ms if known is not None else min(part.since_ms for part in one.parts)
            lost = known.lost if known is not None else 0
            counted_ms = self._counted_ms if known is not None else since_ms
            lost += sum(part.milli * max(0, now_ms - max(part.since_ms, counted_ms)) for part in one.parts)
            spell = Spell(
                newest=one.value, since_ms=since_ms, seen_ms=now_ms, after_ms=int(one.after_s * 1000), lost=lost
            )
            self._spells[one.key] = spell
            if spell.alarmed and (known is None or not known.alarmed):
                self.begun[self._word(one.value)] += 1
        self._spells.update((key, spell) for key, spell in before.items() if spell.survives(now_ms))
        self._counted_ms = now_ms
        return tuple(sorted(self._spells.values(), key=lambda spell: -spell.lost))
