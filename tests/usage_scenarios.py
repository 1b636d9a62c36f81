"""How far the states of the ledger are those that a program wrote down (`tests/usage_programs.py`), second by second."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.core.accounting.activity import IDLE_BELOW, LOW_BELOW
from phalanx.core.accounting.usage_states import PROGRESS_UNKNOWN
from tests.usage_programs import BY_SHARE


@dataclass(frozen=True, slots=True)
class Truth:
    """From `begin_s` to `end_s` the device was in one of these states."""

    begin_s: float
    end_s: float
    states: frozenset[str]


def read_truth(path: str) -> list[Truth]:
    """What a program wrote, without the times of which it told nothing."""
    with open(path, encoding="utf-8") as file:
        lines = sorted(map(json.loads, file), key=lambda line: float(line["at"]))
    found: list[Truth] = []
    for line, after in itertools.pairwise(lines):
        states = frozenset(_by_share(after["share"]) if state == BY_SHARE else state for state in line["is"])
        last = found[-1] if found else None
        if last is not None and (last.end_s, last.states) == (line["at"], states):
            found[-1] = Truth(last.begin_s, after["at"], last.states)
        elif states:
            found.append(Truth(line["at"], after["at"], states))
    return found


def _by_share(share: float) -> str:
    """The state of a process that made no promises: the limits are those that docs/usage-states.md states."""
    return "computing" if share >= LOW_BELOW else "low" if share >= IDLE_BELOW else "idle"


@dataclass(slots=True)
class Score:
    """Seconds of one scenario. `wrong`: by what they were and what they were called. `computing`: those that were computing in truth."""

    right: int = 0
    computing: int = 0
    wrong: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def seconds(self) -> int:
        return self.right + sum(self.wrong.values())

    @property
    def part(self) -> float:
        return self.right / self.seconds

    @property
    def part_if_all_computed(self) -> float:
        """Its score if everything were called computing."""
        return self.computing / self.seconds

    def add(self, truths: Iterable[Truth], spans: Sequence[Mapping[str, Any]], note: str | None) -> None:
        """Compare second by second, each at its middle. `note`: that computing must have; None for any."""
        for truth in truths:
            for second in range(int(truth.begin_s), int(truth.end_s) + 1):
                at_s = second + 0.5
                if not truth.begin_s <= at_s < truth.end_s:
                    continue
                found = next((one for one in spans if one["begin_s"] <= at_s < one["end_s"]), {"state": "nothing"})
                called = found["state"]
                self.computing += "computing" in truth.states
                if called == "computing" and note is not None and (found["note"] == PROGRESS_UNKNOWN) != bool(note):
                    called = f"computing ({found['note']})"
                if called in truth.states:
                    self.right += 1
                else:
                    key = ("/".join(sorted(truth.states)), called)
                    self.wrong[key] = self.wrong.get(key, 0) + 1
