"""The scripted behaviour of a job's tasks, and the state of one simulated task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.work.failure import FailureEvidence
from phalanx.node.logic.events import MemberKey

CANARY_VALUE: Final = "canary-8f2e61"  # value of a variable of every job; only the job's ranks may read it


@dataclass(frozen=True)
class JobBehaviour:
    """The behaviour of a job's tasks.

    Attributes:
        run_s: work of one task; one second is one step, and a checkpoint saves the steps.
        save_every_s: checkpoint interval of rank 0; None for no checkpoints.
        ends: (key, rank) -> (after seconds, code, signal), or None for the normal end.
        refuses: node -> why it cannot prepare; a leading "!" blames the job, "?" the node, "??" its full disk.
        prepare_s: duration of preparing.
        ignores_sigterm: ignores SIGTERM.
        saves_on_stop: rank 0 saves when it is asked to stop.
        port_taken_generations: number of generations that find the rendezvous port in use.
        failing_save: number of the save that fails; 0 for none.
        children_live_s: how long child processes outlive the tasks.
        ready_s: of a replica of a service, time from the start of its tasks until its port answers; None for never.
        hook_s: of a replica, time until its sleep and wake hooks answer.
        failing_hooks: numbers of the hooks of a generation that fail, after they did half of their work.
        unspawnable_generations: number of generations whose tasks cannot be exec'd on node rank 0.
        evidence: (key, rank) -> evidence that the supervisor finds after a failure.
    """

    run_s: float = 5.0
    save_every_s: float | None = None
    ends: Callable[[MemberKey, int], tuple[float, int | None, int | None] | None] = lambda _key, _rank: None
    refuses: dict[str, str] = field(default_factory=dict)
    prepare_s: float = 0.05
    ignores_sigterm: bool = False
    saves_on_stop: bool = False
    port_taken_generations: int = 0
    failing_save: int = 0
    children_live_s: float = 0.0
    hook_s: float = 0.5
    failing_hooks: frozenset[int] = frozenset()
    unspawnable_generations: int = 0
    ready_s: float | None = None
    evidence: Callable[[MemberKey, int], FailureEvidence | None] = lambda _key, _rank: None


@dataclass
class SimulatedTask:
    """A process; it works while its node is running and it is not frozen."""

    key: MemberKey
    rank: int
    device_milli: dict[int, int]
    work_left_s: float
    code: int | None
    signal: int | None
    work_done_s: float = 0.0
    save_every_s: float | None = None
    checkpoint_dir: str = ""
    frozen: bool = False
    started_s: float | None = None  # start of the current work period
    timer_number: int = 0
    ended: bool = False
    saved: int = 0
    freed_milli: dict[int, int] = field(default_factory=dict)  # of devices, while it sleeps
