"""What counts as waste, after which time it is an alarm, and what a queue does with jobs that do not use their GPUs."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.units import format_duration


class WasteKind(enum.StrEnum):
    """A way to waste GPUs. The words are those of `UsageState`, except `crash_loop`, which spans several of its states."""

    UNOCCUPIED = "unoccupied"
    IDLE = "idle"
    HUNG = "hung"
    LOW = "low"
    DATA_BOUND = "data_bound"
    COMMUNICATING = "communicating"
    CRASH_LOOP = "crash_loop"
    BROKEN = "broken"
    FRAGMENTED = "fragmented"


ALARM_AFTER_S: Final[Mapping[WasteKind, float]] = {
    WasteKind.UNOCCUPIED: 600.0,  # a set-up or a download between two programs takes minutes
    WasteKind.IDLE: 900.0,  # an evaluation on the CPU, or a person who reads a result, takes minutes
    WasteKind.HUNG: 300.0,  # a supervisor ends most hangs by itself before
    WasteKind.LOW: 3600.0,  # work is being done; only a lasting habit is worth a change of the request
    WasteKind.DATA_BOUND: 1800.0,  # caches are cold in the first minutes
    WasteKind.COMMUNICATING: 1800.0,  # compilation and warm-up are uneven between ranks
    WasteKind.CRASH_LOOP: 0.0,  # CRASHES_MIN failures are the threshold
    WasteKind.BROKEN: 600.0,  # a reboot takes minutes
    WasteKind.FRAGMENTED: 3600.0,  # jobs end all the time, and most gaps close by themselves
}
"""Seconds in the state after which it is an alarm. The ledger counts the time before as well: a threshold asks for attention, no more."""
WASTE_STATES: Final = (
    "idle",
    "unoccupied",
    "hung",
    "lost",
    "low",
    "data_bound",
    "communicating",
    "broken",
    "fragmented",
)
"""States of the ledger (`UsageState`) that a report of past waste adds up, the most certain waste first. Not in it: what is needed (starts,
saves, stops for others, drains, reservations), and free devices, which wait for work."""
CRASHES_MIN: Final = 3
"""Failures without progress between them that are a crash loop: one may be chance, and two a bad node that the second start avoids."""
OF_QUEUES: Final = tuple(kind for kind in WasteKind if kind not in (WasteKind.BROKEN, WasteKind.FRAGMENTED))
"""Kinds whose threshold a queue may set: free and broken devices belong to no queue."""
IDLE_STATES: Final = (WasteKind.IDLE, WasteKind.UNOCCUPIED)
POLICY_STATES: Final = (WasteKind.IDLE, WasteKind.UNOCCUPIED, WasteKind.LOW, WasteKind.HUNG)
"""States that an idle policy may count: in the others the job works, or its environment is at fault."""
GRACE_DEFAULT_S: Final = 300.0  # from the warning to the action: time to read it and to act


class IdleAction(enum.StrEnum):
    """What a queue does with a job that does not use its GPUs.

    OFF: nothing, also where a queue above has a policy. WARN: a line in the job's history. NOTIFY: a line that also asks for a message to its
    owner. RELEASE: its GPUs are taken back after a save, and it is held. STOP: it is cancelled.
    """

    OFF = "off"
    WARN = "warn"
    NOTIFY = "notify"
    RELEASE = "release"
    STOP = "stop"


class IdleStage(enum.IntEnum):
    """How far a policy is with one job."""

    NONE = 0
    WARNED = 1
    DUE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class IdlePolicy:
    """The idle policy of a queue, for all its jobs and those of the queues below that have none of their own.

    Attributes:
        after_s: all GPUs of a job are in these states for so long.
        grace_s: of this time, how long before its end the warning comes; only for RELEASE and STOP. None: GRACE_DEFAULT_S, at most half.
        states: that count, in the order of `POLICY_STATES`.
        exempt: label NAME=VALUE, or NAME for any value, that exempts a job; empty if none does.
    """

    action: IdleAction
    after_s: float
    grace_s: float | None = None
    states: tuple[WasteKind, ...] = IDLE_STATES
    exempt: str = ""

    @property
    def ends_use(self) -> bool:
        """Whether it takes the GPUs away."""
        return self.action in (IdleAction.RELEASE, IdleAction.STOP)

    @property
    def warn_after_s(self) -> float:
        """When the warning comes."""
        if not self.ends_use:
            return self.after_s
        grace_s = min(GRACE_DEFAULT_S, self.after_s / 2) if self.grace_s is None else self.grace_s
        return self.after_s - grace_s

    def exempts(self, labels: Mapping[str, str]) -> bool:
        """Whether a job with these labels is exempt."""
        name, _, value = self.exempt.partition("=")
        return bool(name) and name in labels and (not value or labels[name] == value)

    @property
    def text(self) -> str:
        """The policy in words."""
        if self.action is IdleAction.OFF:
            return self.action.value
        parts = [f"{self.action} after {format_duration(self.after_s)} {' or '.join(self.states)}"]
        if self.ends_use:
            parts.append(f"warning {format_duration(self.after_s - self.warn_after_s)} before")
        if self.exempt:
            parts.append(f"not jobs with label {self.exempt}")
        return ", ".join(parts)


def alarms_text(alarms: Iterable[tuple[WasteKind, float | None]]) -> str:
    """Thresholds of alarms in words; empty for none."""
    return ", ".join(f"{kind} {'off' if after_s is None else format_duration(after_s)}" for kind, after_s in alarms)
