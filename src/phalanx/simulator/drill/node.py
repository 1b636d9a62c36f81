"""One node in virtual time: the real supervisor logic with simulated processes. `calls` sends its requests to the head."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Final

from phalanx.core.fleet.fitness import BadLink
from phalanx.core.fleet.node import Node
from phalanx.core.ids import SupervisorId
from phalanx.core.state.commands import PrepareTasks
from phalanx.core.state.reports import MemberStopped, Report
from phalanx.core.work.services.service_terms import ReplicaPosition
from phalanx.core.work.spec import JobSpec
from phalanx.node.logic import actions
from phalanx.node.logic.events import (
    FreezeFinished,
    MemberKey,
    MemberPrepared,
    MemberStartFailed,
    OutputDrained,
    SupervisorEvent,
    TerminationRequested,
)
from phalanx.node.logic.supervisor import Supervisor
from phalanx.simulator.drill.behaviour import CANARY_VALUE, JobBehaviour, SimulatedTask
from phalanx.simulator.drill.coverage import MemberStates, member_states
from phalanx.simulator.drill.mig_instances import SimulatedSlices
from phalanx.simulator.drill.network import NodeLink
from phalanx.simulator.drill.processes import KILL_S, SPAWN_S, NodeProcesses
from phalanx.simulator.drill.protocols import NodeEnvironment
from phalanx.simulator.drill.supervisor_calls import SupervisorCalls
from phalanx.simulator.drill.violations import require

SLICE_TRIES: Final = (
    20  # as on a real node: how often a member tries to make its slice where another has to go, and how long it waits
)
SLICE_RETRY_S: Final = 0.5


class DrillNode:
    """One incarnation of a node's supervisor; `record` is the node as it registers."""

    def __init__(
        self, cluster: NodeEnvironment, record: Node, *, incarnation: int = 1, link: NodeLink | None = None
    ) -> None:
        self.cluster = cluster
        self.id = record.id
        self.incarnation = incarnation
        self.supervisor_id = SupervisorId(f"{record.id}-life{incarnation}")
        self.record = replace(record, supervisor_id=self.supervisor_id, joined_s=0.0)
        self.logic = Supervisor(record.id)
        self.processes = NodeProcesses(self)
        self.slices = SimulatedSlices(record)
        self.link = link or NodeLink()
        self.calls = SupervisorCalls(self)
        self.alive, self.paused = True, False
        self.has_orphans = False
        self.unfreezable = False
        self._backlog: deque[SupervisorEvent] = deque()
        self._wake = 0
        self._wake_ns: int | None = None
        self._seen: MemberStates = {}

    @property
    def reachable(self) -> bool:
        """Whether the node and its link work."""
        return self.alive and not self.paused and not self.link.cut

    @property
    def wall_s(self) -> float:
        """The node's wall clock."""
        return self.cluster.now.wall_s

    @property
    def tasks(self) -> dict[tuple[MemberKey, int], SimulatedTask]:
        """The node's processes by member and rank."""
        return self.processes.tasks

    @property
    def reported_members(self) -> tuple[MemberKey, ...]:
        """The members that the supervisor reports at each renewal and registration."""
        return self.calls.members

    @property
    def cut(self) -> bool:
        """Whether both directions of the link are cut."""
        return self.link.cut

    @cut.setter
    def cut(self, cut: bool) -> None:
        self.link.up.cut = self.link.down.cut = cut

    @property
    def latency_s(self) -> float:
        """Latency of each direction."""
        return self.link.up.latency_s

    @latency_s.setter
    def latency_s(self, latency_s: float) -> None:
        self.link.up.latency_s = self.link.down.latency_s = latency_s

    def executing_tasks(self) -> list[SimulatedTask]:
        """Return the tasks that are executing now."""
        if self.paused or not (self.alive or self.has_orphans):
            return []
        return [task for task in self.tasks.values() if not task.frozen]

    # ---- start and stop ------------------------------------------------------------------------------------------------

    def boot(self) -> None:
        """Start the supervisor."""
        self.calls.register()
        self.calls.poll_forever()

    def power_off(self) -> None:
        """Power off without any report."""
        self.alive = self.has_orphans = False
        self.processes.clear()
        self.slices.remove_all()

    def crash_supervisor(self) -> None:
        """Kill the supervisor; the tasks run until they are swept."""
        self.alive, self.has_orphans = False, True
        self.cluster.processes_changed = True

    def pause(self) -> None:
        """Stop the whole node as by SIGSTOP."""
        if self.alive and not self.paused:
            self.processes.suspend_all()
            self.paused = True

    def resume(self) -> None:
        """Resume as by SIGCONT. The supervisor first checks its clock, as each rank checks its lease page."""
        if not self.alive or not self.paused:
            return
        self.paused = False
        events, self._backlog = list(self._backlog), deque()
        self.deliver(*events)
        self.processes.resume_all()
        self.calls.send_events()
        self.calls.renew()

    def terminate(self) -> None:
        """Send SIGTERM to the supervisor: it stops its tasks and exits."""
        self.deliver(TerminationRequested())

    # ---- the supervisor's step and actions -----------------------------------------------------------------------------

    def deliver(self, *happenings: SupervisorEvent) -> None:
        """Step once per event, after due timers, so that each change has one cause."""
        if not self.alive:
            return
        if self.paused:
            self._backlog.extend(happenings)
            return
        if not happenings or (self._wake_ns is not None and self.cluster.clock.ns >= self._wake_ns):
            self._step(())
        for happening in happenings:
            if self.alive:
                self._step((happening,))

    def deliver_later(self, delay_s: float, *happenings: SupervisorEvent) -> None:
        """Deliver the events after a delay."""
        self.cluster.call_after(delay_s, lambda: self.deliver(*happenings))

    def _step(self, inbox: tuple[SupervisorEvent, ...]) -> None:
        clock = self.cluster.clock
        out = self.logic.step(clock.ns, inbox, unix_s=self.wall_s)
        seen = member_states(self.logic.members())
        if seen != self._seen:
            before, self._seen = self._seen, seen
            self.cluster.member_changed(self.id, before, seen, inbox[0] if inbox else None)
        for action in out.actions:
            self._perform(action)
        self._wake += 1
        self._wake_ns = out.wake_ns
        if out.wake_ns is not None:
            number = self._wake
            self.cluster.call_after(
                (out.wake_ns - clock.ns) / 1e9, lambda: self.deliver() if self._wake == number else None
            )

    def _perform(self, action: actions.SupervisorAction) -> None:
        after = self.cluster.call_after
        match action:
            case actions.PrepareMember(key=key, prepare=prepare):
                self.processes.killed.discard(key)
                after(self.behaviour(prepare).prepare_s, lambda: self._prepared(key, prepare))
            case actions.SpawnTasks(key=key, prepare=prepare, start=start):
                after(SPAWN_S, lambda: self.processes.spawn(key, prepare, start))
            case actions.SendSigterm(key=key):
                self.processes.terminate(key)
            case actions.FreezeMember(key=key):
                self._freeze(key)
            case actions.ThawMember(key=key):
                self.processes.thaw(key)
            case actions.KillMember(key=key):
                self.processes.killed.add(key)
                after(KILL_S, lambda: self.processes.kill(key))
            case actions.CheckEmpty(key=key):
                self.processes.probe(key)
            case actions.DrainOutput(key=key):
                self.slices.remove(key)
                taken = self.behaviour_of(key).port_taken_generations > key.generation
                self.deliver_later(0.01, OutputDrained(key=key, tail=b"Address already in use" if taken else b""))
            case actions.CallSleepHook():
                self.processes.call_sleep_hook(action)
            case actions.RemoveCheckpoints(paths=paths):
                self.cluster.deleted_checkpoints.update(paths)
            case actions.SendEvent(event=event):
                self.report(event)
            case actions.PublishMembers(members=members):
                self.calls.members = members
            case actions.RenewLease():
                after(0.0, self.calls.renew)
            case actions.ExitSupervisor():
                self.power_off()
                after(0.1, lambda: self.cluster.report_death(self))
            case (
                actions.UpdateLeasePage()
                | actions.DumpStacks()
                | actions.RemoveScratch()
                | actions.AppendNote()
                | actions.SetPowerLimits()
            ):
                pass

    def report(self, event: Report) -> None:
        """Send a report to the head at least once."""
        if isinstance(event, MemberStopped):
            self._check_stopped(event)
        require(CANARY_VALUE not in repr(event), 23, f"{self.id} sends a secret of a job in {type(event).__name__}")
        self.calls.enqueue_event(event)

    def send_step_report(self, report: Report) -> None:
        """Send a report from a task's step stream."""
        self.calls.send_step_report(report)

    def _check_stopped(self, event: MemberStopped) -> None:
        """Check that a member reported as stopped has no processes left."""
        stopped = (event.epoch, event.generation)
        left = [key for key, _ in self.tasks if key.job_id == event.job_id and (key.epoch, key.generation) <= stopped]
        require(not left, 10, f"{self.id} reports {event.job_id} {stopped} as stopped, but {left} are alive")

    def _freeze(self, key: MemberKey) -> None:
        if not self.unfreezable:
            self.processes.freeze(key)
        self.deliver_later(
            0.0, FreezeFinished(key=key, frozen=not self.unfreezable or not self.processes.tasks_of(key))
        )

    def behaviour(self, prepare: PrepareTasks) -> JobBehaviour:
        """Return the behaviour of the job's tasks."""
        return self._behaviour(prepare.spec, prepare.replica)

    def behaviour_of(self, key: MemberKey) -> JobBehaviour:
        """Return the behaviour of a member's tasks."""
        job = self.cluster.store.job(key.job_id)
        return _DEFAULT if job is None else self._behaviour(job.spec, job.replica)

    def _behaviour(self, spec: JobSpec, replica: ReplicaPosition | None) -> JobBehaviour:
        """Return the behaviour of a job by its name. Revisions of a service differ: by their label, or by `name@revision`."""
        known = self.cluster.behaviours
        revised = None if replica is None else known.get(f"{spec.name}@{replica.revision}")
        labelled = known.get(dict(spec.labels).get("behaviour", ""))
        return labelled or revised or known.get(spec.name, _DEFAULT)

    def report_spawn_failure(self, key: MemberKey) -> None:
        """Report that a task could not be exec'd."""
        self.deliver(MemberStartFailed(key=key, why="cannot exec", charge=False))

    def _prepared(self, key: MemberKey, prepare: PrepareTasks, tries_left: int = SLICE_TRIES) -> None:
        if key in self.processes.killed or not self.alive:
            return
        why = self.behaviour(prepare).refuses.get(self.id, "") or self.cluster.refusing_nodes.get(self.id, "")
        if why:
            self.deliver(
                MemberStartFailed(
                    key=key,
                    why=why.lstrip("!?"),
                    charge=why.startswith("!"),
                    flaw=why.startswith("?"),
                    disk_full=why.startswith("??"),
                )
            )
            return
        cut = [one.node_id for one in prepare.allocation.grants if {self.id, one.node_id} in self.cluster.bad_links]
        if cut:
            bad = tuple(BadLink(peer=peer, why="no connection in 5 s") for peer in cut)
            self.deliver(MemberPrepared(key=key, bad_links=bad))
            return
        grant = prepare.allocation.grant_on(self.id)
        assert grant is not None
        holder = self.slices.holder(key, grant)
        if holder is not None and tries_left and not self._is_live(holder):
            self.cluster.call_after(SLICE_RETRY_S, lambda: self._prepared(key, prepare, tries_left - 1))
            return
        self.slices.make(key, grant)
        if grant.node_rank:
            self.deliver(MemberPrepared(key=key))
            return
        whole = (one for one in prepare.candidates if one.digest not in self.cluster.corrupt_checkpoints)
        service_port = 0 if prepare.replica is None else 21_000 + int(key.job_id) % 10_000
        self.deliver(
            MemberPrepared(key=key, port=20_000 + key.generation, resume=next(whole, None), service_port=service_port)
        )

    def _is_live(self, key: MemberKey) -> bool:
        """Whether the head counts the devices of the member's attempt as held."""
        attempts = self.cluster.store.attempts(key.job_id)
        return any(attempt.epoch == key.epoch and attempt.holds_allocation for attempt in attempts)


_DEFAULT = JobBehaviour()
