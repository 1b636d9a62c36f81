"""What goes wrong at a cloud of a campaign, drawn from a seed, and the bill: every machine that ever was, and from when to when it is charged.

Faults: throttling, connections that end before or after a call was carried out, calls that arrive twice or seconds later, places without capacity
for a while, and lists that lag behind. Only the standard library is needed: moto's environment has nothing of ours.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

LAG_S = (0.0, 0.0, 0.5, 2.0)  # until a new machine is listed
LATE_S = (0.5, 2.0, 5.0)  # until a delayed call is carried out
OUT_S = 20.0  # how long a place has no capacity
THROTTLED, LOST_BEFORE, DELAYED, TWICE, LOST_AFTER, EMPTY = 0.05, 0.03, 0.03, 0.03, 0.05, 0.02  # shares of the calls
A = TypeVar("A")


class CloudFaults:
    """The dice of one cloud, its bill, and what was counted. `faults`: a factor of all shares; 0 for none."""

    def __init__(self, seed: int, faults: float) -> None:
        self.dice, self.faults = random.Random(seed), faults
        self.lock = threading.RLock()
        self.machines: dict[str, dict[str, Any]] = {}
        self.counts: dict[str, int] = {}
        self.visible_s: dict[str, float] = {}
        self._empty_until_s: dict[str, float] = {}

    def count(self, what: str) -> None:
        """Count a call or a fault, for the report."""
        with self.lock:
            self.counts[what] = self.counts.get(what, 0) + 1

    def chance(self, share: float) -> bool:
        """Draw whether a fault of this share happens."""
        with self.lock:
            return self.dice.random() < share * self.faults

    def is_empty(self, where: str) -> bool:
        """Draw whether a place has no capacity now."""
        with self.lock:
            now_s = time.monotonic()
            if self._empty_until_s.get(where, 0.0) < now_s and self.chance(EMPTY):
                self._empty_until_s[where] = now_s + OUT_S
            return self._empty_until_s.get(where, 0.0) > now_s

    def created(self, machine: str, token: str, node: str, since_s: float) -> None:
        """Write that a machine is charged from now on, and draw when lists show it."""
        with self.lock:
            record = {"machine": machine, "token": token, "node": node, "since_s": since_s, "until_s": None}
            self.machines[machine] = record
            self.visible_s[machine] = time.monotonic() + (self.dice.choice(LAG_S) if self.faults else 0.0)

    def ended(self, machine: str, until_s: float) -> None:
        """Write the end of a machine; only the first one counts."""
        with self.lock:
            if self.machines[machine]["until_s"] is None:
                self.machines[machine]["until_s"] = until_s

    def is_listed(self, machine: str) -> bool:
        """Whether lists show a machine already."""
        return self.visible_s.get(machine, 0.0) <= time.monotonic()

    def deliver(
        self, carry_out: Callable[[bool], A], throttled: Callable[[], A], *, changes: bool, calm: bool = False
    ) -> A | None:
        """Carry out a call under faults, and return its answer; None: the connection ends without one.

        Args:
            carry_out: does what the call asks for; told whether somebody waits for the answer.
            throttled: makes the answer to a call that is refused for its rate.
            changes: the call starts or stops something.
            calm: no faults.
        """
        if calm or not self.faults:
            return carry_out(True)
        if self.chance(THROTTLED):
            self.count("throttled")
            return throttled()
        if changes and self.chance(LOST_BEFORE):
            self.count("lost before")
            return None
        if changes and self.chance(DELAYED):
            self.count("delayed")
            with self.lock:
                late_s = self.dice.choice(LATE_S)
            timer = threading.Timer(late_s, carry_out, (False,))
            timer.daemon = True
            timer.start()
            return None
        if changes and self.chance(TWICE):
            self.count("arrived twice")
            carry_out(False)
        answer = carry_out(True)
        if changes and self.chance(LOST_AFTER):
            self.count("lost after")
            return None
        return answer
