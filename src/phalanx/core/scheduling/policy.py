"""The contract of a scheduling policy: who starts, who is stopped or moved, and when. tests/contract/test_policy_contract.py checks it.

A policy is created once for a scheduler and decides on one `Board` after another: when the fleet's hardware or a queue changes, the
scheduler makes a new board and attaches the policy to it. The board reports every change to the policy at once; after changes, and at the
time that the policy asked for, the scheduler calls `decide`, and carries out the decisions that the board has recorded.

Inputs: the board's queries, the entries of its jobs, and `now_s`. A policy reads no clock, file or random number: equal calls give equal
decisions, and ties end in `JobEntry.seq`.

Outputs: `board.start`, `board.stop` and `board.move`, which change the board at once, and the time of the next call.

Invariants, which the policy must keep:
1. It starts only jobs in `board.waiting` whose class `board.admits` at that moment, at places that `board.find` or `find_need` returned.
2. It stops and moves only jobs in `board.running`, none with `never_stopped`. It stops none for `StopReason.VALUE` before the job's
   `protected_until_s`.
3. After `on_withdrawn`, `on_ended` and `on_stopped` it does not decide on the job again, except if `on_waiting` reports it.
4. A job that is alone on an idle fleet, fits and is admitted starts: in this call of `decide`, or in the one at the time returned.
5. The time that `decide` returns is after `now_s`.
6. The cost of a call is proportional to the changes and the waiting classes, not to all jobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from phalanx.core.ids import JobId
from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.board_records import BoardListener, JobEntry, StopReason
from phalanx.core.scheduling.estimates.move_times import MoveTimes
from phalanx.core.scheduling.estimates.run_time_prediction import JobTraits
from phalanx.core.work.pace import MeasuredPace


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedSamples:
    """Speeds on models, relative to each other, and on how many runs they are based; `speeds` is empty if nothing is known."""

    speeds: Mapping[str, float] = field(default_factory=dict)
    runs: int = 0


NO_SAMPLES: Final = SpeedSamples()


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterStops:
    """Jobs that a waiting job may stop by right `after_s` seconds after their starts, and the right."""

    jobs: Sequence[JobEntry] = ()
    after_s: float = 0.0
    reason: StopReason = StopReason.PRIORITY


NO_LATER_STOPS: Final = LaterStops()


class Policy(BoardListener):
    """See the module. Parameters and what was learned belong to the object; `attach` drops everything else.

    Attributes:
        overtakes: a later job may start before an earlier one that fits; for explanations of waits.
        uses_run_times: it reads `JobEntry.size_s`.
        board: on which it decides.
    """

    overtakes = True
    uses_run_times = False
    board: Board

    def attach(self, board: Board) -> None:
        """Decide on this board from now on, on which nothing waits or runs yet. Extend it to drop the order of the board before."""
        self.board = board
        board.attach_listener(self)

    def decide(self, now_s: float) -> float | None:
        """Decide on the board; return when to be called again even without a change, or None."""
        raise NotImplementedError

    def movable_from_s(self, entry: JobEntry) -> float:
        """The time from which the scheduler itself may move the running job."""
        return MoveTimes(self.board.restart_cost_s).from_s(entry)

    def later_moves(self, entry: JobEntry, now_s: float) -> list[tuple[JobEntry, float]]:
        """The moves that would make room for the waiting job and are not due yet: each job, and when it may move. Empty if moves make no room."""
        del entry, now_s
        return []

    def later_stops(self, entry: JobEntry, now_s: float) -> LaterStops:
        """The jobs that the waiting job has a right to stop, but not yet. Empty if it has no right, or if they make no room."""
        del entry, now_s
        return NO_LATER_STOPS

    def on_placed(self, entry: JobEntry, now_s: float) -> None:
        """The start that was decided takes effect now: until then its nodes were not free."""

    def learn(self, label: int, gpus: int, submit_s: float, run_time_s: float) -> None:
        """Learn from a job that ended before this scheduler began; `label` as in `JobClass.label`."""

    def learn_pace(self, job_id: JobId, traits: JobTraits, measured: MeasuredPace) -> bool:
        """Learn how fast the steps of one of the job's attempts ran; return whether this is new. The same may be reported again."""
        del job_id, traits, measured
        return False

    def pace_samples(self, job_id: JobId, traits: JobTraits) -> SpeedSamples:
        """Return the job's speeds on models of devices, relative to each other, as learned from its own and from similar attempts."""
        del job_id, traits
        return NO_SAMPLES

    def drop_label(self, label: int) -> None:
        """Drop what was learned of a label: its number will mean other jobs."""

    def copy_for_trial(self) -> Self:
        """Return a policy with the same parameters and a copy of what was learned, to be attached to a board of a trial."""
        return type(self)()

    def release(self) -> None:
        """A trial is over: break the reference cycles, so that all of it is freed at once."""
