"""The scripted behaviour of a job's tasks, and the state of one simulated task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.work.failure import Evidence
from phalanx.node.logic.happenings import MemberKey

CANARY: Final = "canary-8f2e61"  # value of a variable of every job; only the job's ranks may read it


@dataclass(frozen=True)
class Behaviour:
    """The behaviour of a job's tasks.

    Attributes:
        run_s: work of one task; one second is one step, and a checkpoint saves the steps.
        save_every_s: checkpoint interval of rank 0; None for no checkpoints.
        ends: (key, rank) -> (after seconds, code, signal), or None for the normal end.
        refuses: node -> why it cannot prepare; a leading "!" blames the job, "?" the node.
        prepare_s: duration of preparing.
        stubborn: ignores SIGTERM.
        saves: rank 0 saves when it is asked to stop.
        port_taken: number of generations that find the rendezvous port in use.
        bad_save: number of the save that fails; 0 for none.
        leaves_s: how long child processes outlive the tasks.
        unspawnable: number of generations whose tasks cannot be exec'd on node rank 0.
        evidence: (key, rank) -> evidence that the supervisor finds after a failure.
    """

    run_s: float = 5.0
    save_every_s: float | None = None
    ends: Callable[[MemberKey, int], tuple[float, int | None, int | None] | None] = lambda _key, _rank: None
    refuses: dict[str, str] = field(default_factory=dict)
    prepare_s: float = 0.05
    stubborn: bool = False
    saves: bool = False
    port_taken: int = 0
    bad_save: int = 0
    leaves_s: float = 0.0
    unspawnable: int = 0
    evidence: Callable[[MemberKey, int], Evidence | None] = lambda _key, _rank: None


@dataclass
class Task:
    """A process; it works while its node is running and it is not frozen."""

    key: MemberKey
    rank: int
    devices: tuple[int, ...]
    left_s: float
    code: int | None
    signal: int | None
    done_s: float = 0.0
    save_every_s: float | None = None
    checkpoint_dir: str = ""
    frozen: bool = False
    since_s: float | None = None  # start of the current work period
    token: int = 0
    ended: bool = False
    saved: int = 0
