"""Runtime state of each member on this node: its processes, lease page and report pipe.

The loop writes the table; worker threads and callbacks read it. A Present outlives its processes until the logic cleans up.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.ids import Epoch, Generation, JobId
from phalanx.core.state.commands import PrepareTasks, StartTasks
from phalanx.core.work.allocation import NodeGrant
from phalanx.core.work.failure import MemoryOveruse, StuckPosition
from phalanx.core.work.job import PublishedCheckpoint
from phalanx.node.logic.accounts import NodeAccount
from phalanx.node.logic.actions import UpdateLeasePage
from phalanx.node.logic.events import MemberKey
from phalanx.node.logic.hang_detector import HangDetector
from phalanx.node.logic.local_copies import local_checkpoint_path
from phalanx.node.logic.output_mask import OutputMasker
from phalanx.node.member.container_runtime import ContainerRuntime
from phalanx.node.member.rank_reports import ReportPipeReader
from phalanx.node.member.scratch import Scratch
from phalanx.node.probes.virtual_devices import SlotTenant
from phalanx.node.processes.attempt_processes import AttemptProcesses
from phalanx.node.processes.containment import AttemptKey
from phalanx.node.processes.zygote import Zygote
from phalanx.wire.rank import LeasePage, RankStopReason

_FIRST_DEADLINE: Final = 1  # always in the past: a page without a lease allows no step
_TASK: Final = "rank-"


def rank_task_id(rank: int) -> str:
    """The task id of a rank, also the name of its stream."""
    return f"{_TASK}{rank}"


def rank_of(task: str) -> int | None:
    """The rank that has this task id; None for another task."""
    return int(task.removeprefix(_TASK)) if task.startswith(_TASK) else None


@dataclass(slots=True, kw_only=True)
class MemberRuntime:
    """One member. `cancelled` aborts its preparation or start; `containment_lock` serialises calls of its containment.

    Attributes:
        not_frozen: cleared while the member is frozen; no task is started then.
        secrets: values of its secrets, by variable. masker: masks them in a text; None without any.
        store_variables: the environment of programs that store its checkpoints in an object store; empty if none does.
        setup_code: exit code of a preparation command (`aside`) as a shell gives it, set with `setup_done`.
        container: the container that its tasks run in (`container`); None to run on the node itself.
        venv: folder of the environment that its processes run in; "" for none.
        software: what the environment that its job names changes in the variables of its processes; None removes one.
        mps: pipe folder of the MPS daemon of its shared device; "" without one.
        slices: UUIDs of its MIG slices, by local rank; empty without.
        all_devices_answer: when its devices were checked, every device of the node answered.
        data: what its ranks get for each dataset, by name: a path or an address.
        staging: file with the progress of the program that stages its data, while it runs; else "".
        cleanup: resources to release when none of its processes is left.
        pids: of started tasks, by rank; for the sampler, not a reliable list of live processes.
        stream_starts: length of each rank's stream when this generation began.
        checkpoints, outputs: the job's folders on this node, if the gang's nodes do not share the head's.
        local_checkpoint: the complete local checkpoint to resume from.
        may_publish: whether a job may resume from checkpoints that its ranks save.
        crashed: one of its tasks was ended by a signal.
        asleep: its program has freed its devices, which others may use.
        imports_jax: its script, or a module beside it, imports JAX.
        account: the account of its processes and files; None for the supervisor's own.
        pace: of its ranks' steps; `watch` updates and reads it.
        stuck_positions: stuck position of each rank, once its stacks were taken.
        asked_to_end: its tasks were asked to end, so their exits are no evidence.
        evidence_collected: number of tasks whose output was collected as evidence.
        spawned_ns: when the start of its tasks began.
        oom_kills_before, machine_oom_kills_before: OOM kills counted then, in its cgroup and on the machine; None without a counter.
        memory_overuse: what its processes used when they needed more memory than the job asked for, once they did.
    """

    key: MemberKey
    prepare: PrepareTasks
    grant: NodeGrant
    scratch: Scratch
    workdir: str
    cancelled: threading.Event = field(default_factory=threading.Event)
    not_frozen: threading.Event = field(default_factory=threading.Event)
    containment_lock: threading.RLock = field(default_factory=threading.RLock)
    processes: AttemptProcesses | None = None
    reports: ReportPipeReader | None = None
    zygote: Zygote | None = None
    start: StartTasks | None = None
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    store_variables: dict[str, str] = field(default_factory=dict, repr=False)
    masker: OutputMasker | None = field(default=None, repr=False)
    setup_done: threading.Event = field(default_factory=threading.Event)
    setup_code: int = 0
    container: ContainerRuntime | None = None
    venv: str = ""
    software: dict[str, str | None] = field(default_factory=dict)
    mps: str = ""
    slices: tuple[str, ...] = ()
    all_devices_answer: bool = False
    data: tuple[tuple[str, str], ...] = ()
    staging: str = ""
    cleanup: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    pids: dict[int, int] = field(default_factory=dict)
    stream_starts: dict[int, int] = field(default_factory=dict)
    checkpoints: str = ""
    outputs: str = ""
    local_checkpoint: PublishedCheckpoint | None = None
    may_publish: bool = True
    imports_jax: bool = False
    account: NodeAccount | None = None
    crashed: bool = False
    asleep: bool = False
    pace: HangDetector | None = None
    stuck_positions: dict[int, StuckPosition] = field(default_factory=dict)
    asked_to_end: bool = False
    evidence_collected: int = 0
    spawned_ns: int = 0
    oom_kills_before: int | None = None
    machine_oom_kills_before: int | None = None
    memory_overuse: MemoryOveruse | None = None
    _page_lock: threading.Lock = field(default_factory=threading.Lock)
    _page: LeasePage | None = None
    _page_fields: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Start in the running state."""
        self.not_frozen.set()

    def find_memory_overuse(self) -> MemoryOveruse | None:
        """What its processes used when the kernel or the watch found that they need more memory than the job asked for; None if neither did."""
        processes = self.processes
        if self.memory_overuse is None and processes is not None and not processes.containment.limits.measured:
            self.memory_overuse = processes.memory_overuse()
        return self.memory_overuse

    def cancel(self) -> None:
        """Abort its preparation or start, and wake all threads that wait for it."""
        self.cancelled.set()
        self.setup_done.set()
        self.not_frozen.set()

    def make_page(self, *, deadline_ns: int, job_deadline_ns: int) -> None:
        """Create the lease page, with the fields that were written before.

        Raises:
            OSError: it cannot be created.
        """
        with self._page_lock:
            fields = dict(self._page_fields)
            deadline_ns = fields.pop("deadline_ns", deadline_ns)
            with self.scratch.open_folder() as folder:
                self._page = LeasePage.create(
                    self.scratch.page,
                    folder=folder,
                    epoch=self.key.epoch,
                    generation=self.key.generation,
                    deadline_ns=max(deadline_ns, _FIRST_DEADLINE),
                    job_deadline_ns=job_deadline_ns,
                )
            self._page.write(**fields)

    def write_page(self, order: UpdateLeasePage) -> None:
        """Write fields, or keep them until the page exists. The limit is written before the stop, so that no rank sees the stop alone."""
        fields: dict[str, int] = {}
        if order.stop_by_ns is not None:
            fields["stop_by_ns"] = order.stop_by_ns
        if order.stop is not None and order.stop is not RankStopReason.NONE:
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
    def ended_in_order(self) -> bool:
        """Whether its ranks ended by themselves, or were asked to end and had time."""
        stop = self._page_fields.get("stop", RankStopReason.NONE)
        return not self.crashed if stop in (RankStopReason.NONE, RankStopReason.RESTART) else True

    def close_page(self) -> None:
        """Unmap it; the ranks of this generation are gone."""
        with self._page_lock:
            if self._page is not None:
                self._page.close()
                self._page = None


class MemberRuntimes:
    """All members of the node; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_key: dict[MemberKey, MemberRuntime] = {}

    def add(self, member: MemberRuntime) -> None:
        """Add a member."""
        with self._lock:
            self._by_key[member.key] = member

    def get(self, key: MemberKey) -> MemberRuntime | None:
        """The member; None if it is gone."""
        return self._by_key.get(key)

    def of_process(self, key: AttemptKey) -> MemberRuntime | None:
        """The member whose processes have this key."""
        return self._by_key.get(member_key(key))

    def of_attempt(self, job_id: JobId, epoch: Epoch) -> list[MemberRuntime]:
        """All generations of an attempt on this node."""
        return [p for p in self.all() if p.key.job_id == job_id and p.key.epoch == epoch]

    def resume_folders(self, job_id: JobId, epoch: Epoch) -> set[str]:
        """The folders of local checkpoints that an attempt resumes from, or may: ranks load one while earlier saves are still uploaded."""
        found: set[str] = set()
        for member in self.of_attempt(job_id, epoch):
            known = [*member.prepare.candidates, *filter(None, (member.local_checkpoint,))]
            copies = (local_checkpoint_path(member.prepare, one, member.checkpoints) for one in known)
            found |= {copy for copy in copies if copy is not None}
        return found

    def remove(self, key: MemberKey) -> MemberRuntime | None:
        """Remove a member."""
        with self._lock:
            return self._by_key.pop(key, None)

    def all(self) -> list[MemberRuntime]:
        """A list of all members."""
        with self._lock:
            return list(self._by_key.values())

    def job_by_device(self) -> dict[int, JobId]:
        """The job on each device index; the last that started, if several share it."""
        return {index: member.key.job_id for member in self._present() for index in member.grant.devices}

    def tenants_by_device(self) -> dict[int, tuple[SlotTenant, ...]]:
        """The jobs on each device index: rank by rank if their numbers are equal, otherwise all ranks on all devices."""
        found: dict[int, tuple[SlotTenant, ...]] = {}
        for member in self._present():
            keeper = None if member.processes is None else member.processes.keeper_pid
            if keeper is None:
                continue
            grant, first = member.grant, member.grant.first_rank
            ranks = {rank - first: pid for rank, pid in member.pids.copy().items()}
            for place, index in enumerate(grant.devices):
                own = frozenset({place}) if grant.tasks == len(grant.devices) else None
                tenant = SlotTenant(keeper=keeper, ranks=ranks, local_ranks=own)
                found[index] = (*found.get(index, ()), tenant)
        return found

    def _present(self) -> list[MemberRuntime]:
        """Members whose ranks have started, also if they have ended: what they started may still run."""
        return [member for member in self.all() if member.stream_starts and not member.asleep]


def member_key(key: AttemptKey) -> MemberKey:
    """The logic's key for a key of the process layer."""
    return MemberKey(JobId(key.job_id), Epoch(key.epoch), Generation(key.generation))
