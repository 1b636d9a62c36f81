"""Runtime state of each member on this node: its processes, lease page and report pipe.

The loop writes the table; worker threads and callbacks read it. A Present outlives its processes until the logic cleans up.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.ids import Epoch, Generation, JobId
from phalanx.core.state.commands import Prepare, StartTasks
from phalanx.core.work.allocation import Grant
from phalanx.core.work.failure import Stance
from phalanx.core.work.job import Resume
from phalanx.node.logic.accounts import Account
from phalanx.node.logic.actions import WritePage
from phalanx.node.logic.happenings import MemberKey
from phalanx.node.logic.kept import own_copy
from phalanx.node.logic.pace import Pace
from phalanx.node.shell.containment import AttemptKey
from phalanx.node.shell.inside import Inside
from phalanx.node.shell.processes import AttemptProcesses
from phalanx.node.shell.reports import ReportPipe
from phalanx.node.shell.scratch import Scratch
from phalanx.node.shell.zygote import Zygote
from phalanx.wire.rank import LeasePage, StopReason

_FIRST_DEADLINE: Final = 1  # always in the past: a page without a lease allows no step
_TASK: Final = "rank-"


def task_id(rank: int) -> str:
    """The task id of a rank, also the name of its stream."""
    return f"{_TASK}{rank}"


def rank_of(task: str) -> int | None:
    """The rank that has this task id; None for another task."""
    return int(task.removeprefix(_TASK)) if task.startswith(_TASK) else None


@dataclass(slots=True, kw_only=True)
class Present:
    """One member. `cancelled` aborts its preparation or start; `containing` serialises calls of its containment.

    Attributes:
        running: cleared while the member is frozen; no task is started then.
        setup_code: exit code of a preparation command (`aside`) as a shell gives it, set with `setup_done`.
        inside: the container that its tasks run in (`inside`); None to run on the node itself.
        venv: folder of the environment that its processes run in; "" for none.
        closing: resources to release when none of its processes is left.
        pids: of started tasks, by rank; for the sampler, not a reliable list of live processes.
        spawned_at: length of each rank's stream when this generation began.
        checkpoints, outputs: the job's folders on this node, if the gang's nodes do not share the head's.
        brought: the complete local checkpoint to resume from.
        publishes: whether a job may resume from checkpoints that its ranks save.
        crashed: one of its tasks was ended by a signal.
        account: the account of its processes and files; None for the supervisor's own.
        pace: of its ranks' steps; `watch` updates and reads it.
        stances: stuck position of each rank, once its stacks were taken.
        ending: its tasks were asked to end, so their exits are no evidence.
        failed: number of tasks whose output was collected as evidence.
        spawned_ns: when the start of its tasks began.
        oom_before, oom_before_here: OOM kills counted then, in its cgroup and on the machine; None without a counter.
    """

    key: MemberKey
    prepare: Prepare
    grant: Grant
    scratch: Scratch
    workdir: str
    cancelled: threading.Event = field(default_factory=threading.Event)
    running: threading.Event = field(default_factory=threading.Event)
    containing: threading.RLock = field(default_factory=threading.RLock)
    processes: AttemptProcesses | None = None
    reports: ReportPipe | None = None
    zygote: Zygote | None = None
    start: StartTasks | None = None
    environment: dict[str, str] = field(default_factory=dict)
    setup_done: threading.Event = field(default_factory=threading.Event)
    setup_code: int = 0
    inside: Inside | None = None
    venv: str = ""
    closing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    pids: dict[int, int] = field(default_factory=dict)
    spawned_at: dict[int, int] = field(default_factory=dict)
    checkpoints: str = ""
    outputs: str = ""
    brought: Resume | None = None
    publishes: bool = True
    account: Account | None = None
    crashed: bool = False
    pace: Pace | None = None
    stances: dict[int, Stance] = field(default_factory=dict)
    ending: bool = False
    failed: int = 0
    spawned_ns: int = 0
    oom_before: int | None = None
    oom_before_here: int | None = None
    _page_lock: threading.Lock = field(default_factory=threading.Lock)
    _page: LeasePage | None = None
    _page_fields: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Start in the running state."""
        self.running.set()

    @property
    def cgroup(self) -> str | None:
        """The folder of its cgroup; None without one."""
        return None if self.processes is None else self.processes.cgroup

    def cancel(self) -> None:
        """Abort its preparation or start, and wake all threads that wait for it."""
        self.cancelled.set()
        self.setup_done.set()
        self.running.set()

    def make_page(self, *, deadline_ns: int, job_deadline_ns: int) -> None:
        """Create the lease page, with the fields that were written before.

        Raises:
            OSError: it cannot be created.
        """
        with self._page_lock:
            fields = dict(self._page_fields)
            deadline_ns = fields.pop("deadline_ns", deadline_ns)
            with self.scratch.inside() as folder:
                self._page = LeasePage.create(
                    self.scratch.page,
                    folder=folder,
                    epoch=self.key.epoch,
                    generation=self.key.generation,
                    deadline_ns=max(deadline_ns, _FIRST_DEADLINE),
                    job_deadline_ns=job_deadline_ns,
                )
            self._page.write(**fields)

    def write_page(self, order: WritePage) -> None:
        """Write fields, or keep them until the page exists. The limit is written before the stop, so that no rank sees the stop alone."""
        fields: dict[str, int] = {}
        if order.stop_by_ns is not None:
            fields["stop_by_ns"] = order.stop_by_ns
        if order.stop is not None and order.stop is not StopReason.NONE:
            fields["stop"] = int(order.stop)
        if order.deadline_ns is not None:
            fields["deadline_ns"] = order.deadline_ns
        with self._page_lock:
            if order.save_now:
                fields["checkpoint_now"] = self._page_fields.get("checkpoint_now", 0) + 1
            self._page_fields |= fields
            if self._page is not None:
                self._page.write(**fields)

    @property
    def ends_in_order(self) -> bool:
        """Whether its ranks ended by themselves, or were asked to end and had time."""
        stop = self._page_fields.get("stop", StopReason.NONE)
        return not self.crashed if stop in (StopReason.NONE, StopReason.RESTART) else True

    def close_page(self) -> None:
        """Unmap it; the ranks of this generation are gone."""
        with self._page_lock:
            if self._page is not None:
                self._page.close()
                self._page = None


class Presents:
    """All members of the node; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_key: dict[MemberKey, Present] = {}

    def add(self, member: Present) -> None:
        """Add a member."""
        with self._lock:
            self._by_key[member.key] = member

    def get(self, key: MemberKey) -> Present | None:
        """The member; None if it is gone."""
        return self._by_key.get(key)

    def of_process(self, key: AttemptKey) -> Present | None:
        """The member whose processes have this key."""
        return self._by_key.get(member_key(key))

    def of_attempt(self, job_id: JobId, epoch: Epoch) -> list[Present]:
        """All generations of an attempt on this node."""
        return [p for p in self.all() if p.key.job_id == job_id and p.key.epoch == epoch]

    def resumed(self, job_id: JobId, epoch: Epoch) -> set[str]:
        """The folders of local checkpoints that an attempt resumes from, or may: ranks load one while earlier saves are still uploaded."""
        found: set[str] = set()
        for member in self.of_attempt(job_id, epoch):
            known = [*member.prepare.candidates, *filter(None, (member.brought,))]
            copies = (own_copy(member.prepare, one, member.checkpoints) for one in known)
            found |= {copy for copy in copies if copy is not None}
        return found

    def remove(self, key: MemberKey) -> Present | None:
        """Remove a member."""
        with self._lock:
            return self._by_key.pop(key, None)

    def all(self) -> list[Present]:
        """A list of all members."""
        with self._lock:
            return list(self._by_key.values())

    def jobs(self) -> dict[int, JobId]:
        """The job on each device index."""
        return {index: member.key.job_id for member in self._live() for index in member.grant.devices}

    def pids(self) -> dict[int, tuple[int, ...]]:
        """The pids on each device index: rank by rank if their numbers are equal, otherwise all pids on all devices."""
        found: dict[int, tuple[int, ...]] = {}
        for member in self._live():
            pids = tuple(pid for _, pid in sorted(member.pids.copy().items()))
            devices = member.grant.devices
            paired = member.grant.tasks == len(devices)
            for local_rank, index in enumerate(devices):
                found[index] = pids[local_rank : local_rank + 1] if paired else pids
        return found

    def _live(self) -> list[Present]:
        return [member for member in self.all() if member.pids]


def member_key(key: AttemptKey) -> MemberKey:
    """The logic's key for a key of the process layer."""
    return MemberKey(JobId(key.job_id), Epoch(key.epoch), Generation(key.generation))
