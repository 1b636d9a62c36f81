"""The kinds of injected faults: effect, target and duration. Faults last for some time, so that they overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Final

from phalanx.controller.leases import LONG_LEASES_GRANTED_WITHIN_S, MARGIN_S
from phalanx.core.errors import TryLater
from phalanx.core.ids import JobId, SupervisorId
from phalanx.core.state.events import PreparePlannedStop
from phalanx.core.state.reports import AttemptWithdrawn, NodeDied
from phalanx.core.work.attempt import Attempt, EndCause, MemberState
from phalanx.core.work.states import AttemptState
from phalanx.node.logic.events import HangDetected
from phalanx.node.logic.hang_detector import Hang
from phalanx.simulator.drill.disk import CommitCrash
from phalanx.simulator.drill.network import LATENCY_S, NetworkDirection
from phalanx.simulator.drill.violations import require

if TYPE_CHECKING:
    from phalanx.core.state.world import World
    from phalanx.simulator.drill.cluster import DrillCluster
    from phalanx.simulator.drill.node import DrillNode

FAULT_DURATIONS_S: Final = (0.3, 3.0, 5.5, 9.0, 25.0)  # around the lease of 6 s, and well above it
LONG_LEASE_S: Final = 30.0  # length of leases granted before a planned stop
STOP_DELAY_S: Final = 2.0  # enough for a renewal of every supervisor
HANG_NOTICED_S: Final = 3.0  # scaled to the short jobs of a drill
_BY_SCHEDULER: Final = (EndCause.PREEMPTED, EndCause.MOVED)
_S = AttemptState
_PROCESSES: Final = frozenset({_S.STARTING, _S.RUNNING, _S.STOPPING})  # states in which there may be processes
FAULT_KINDS: Final[dict[str, frozenset[AttemptState]]] = {
    "head_crash": frozenset(_S) - {_S.ENDED},
    "head_crash_before_write": frozenset(_S) - {_S.ENDED},
    "head_crash_after_write": frozenset(_S) - {_S.ENDED},
    "torn_write": frozenset(_S) - {_S.ENDED},
    "head_stop": frozenset(_S) - {_S.ENDED},
    "disk_full": frozenset(_S) - {_S.ENDED},
    "slow_disk": frozenset(_S) - {_S.ENDED},
    "node_death": frozenset(_S) - {_S.ENDED},
    "node_death_silent": frozenset(_S) - {_S.ENDED},
    "node_death_reported_late": frozenset(_S) - {_S.ENDED},
    "freeze": frozenset(_S) - {_S.ENDED},
    "partition": frozenset(_S) - {_S.ENDED},
    "partition_to_head": frozenset(_S) - {_S.ENDED},
    "partition_from_head": frozenset(_S) - {_S.ENDED},
    "loss": frozenset(_S) - {_S.ENDED},
    "delay": frozenset(_S) - {_S.ENDED},
    "duplication": frozenset(_S) - {_S.ENDED},
    "reorder": frozenset(_S) - {_S.ENDED},
    "commands_lost": frozenset(_S) - {_S.ENDED},
    "reports_again": frozenset(_S) - {_S.ENDED},
    "clock_jump": frozenset(_S) - {_S.ENDED},
    "supervisor_crash": frozenset(_S) - {_S.ENDED},
    "supervisor_ended": frozenset(_S) - {_S.ENDED},
    "engine_lies": frozenset(_S) - {_S.ENDED},
    "engine_withdraws": frozenset({_S.PLACED, _S.STOPPING}),  # after the barrier an engine has nothing to withdraw
    "devices_change": frozenset(_S) - {_S.ENDED},
    "unfit_node": frozenset(_S) - {_S.ENDED},
    "bad_link": frozenset(_S) - {_S.ENDED},
    "corrupt_checkpoint": frozenset({_S.RUNNING, _S.STOPPING}),  # not detectable after the check by node rank 0
    "crash_loop": _PROCESSES,
    "hang": frozenset({_S.RUNNING}),  # only running ranks make steps
    "keeper_killed": _PROCESSES,
    "unkillable": _PROCESSES,
    "unfreezable": _PROCESSES,
}
"""Each kind with the attempt states that it can hit."""


class FaultInjector:
    """Injects faults. Each method returns whether it found a target."""

    def __init__(self, cluster: DrillCluster, dice: Random) -> None:
        self._cluster, self._dice = cluster, dice
        self.active = True
        cluster.on_head_death = self._head_died
        self._by_kind: dict[str, Callable[[DrillNode], bool]] = {
            "head_crash": self._head_crash,
            "head_crash_before_write": lambda _: self._crash_in_commit(CommitCrash.BEFORE),
            "head_crash_after_write": lambda _: self._crash_in_commit(CommitCrash.AFTER),
            "torn_write": lambda _: self._crash_in_commit(CommitCrash.TORN),
            "head_stop": self._head_stop,
            "disk_full": self._disk_full,
            "slow_disk": self._slow_disk,
            "node_death": lambda node: self._node_death(node, silent=False),
            "node_death_silent": lambda node: self._node_death(node, silent=True),
            "node_death_reported_late": self._late_report,
            "freeze": self._freeze,
            "partition": lambda node: self._cut(node.link.up, node.link.down),
            "partition_to_head": lambda node: self._cut(node.link.up),
            "partition_from_head": lambda node: self._cut(node.link.down),
            "loss": lambda node: self._bad_ways(node, loss=dice.choice((0.2, 0.6))),
            "delay": lambda node: self._bad_ways(node, latency_s=dice.choice((0.3, 1.5))),
            "duplication": lambda node: self._bad_ways(node, double=0.7, spread_s=0.2),
            "reorder": lambda node: self._bad_ways(node, spread_s=dice.choice((0.5, 2.5))),
            "commands_lost": self._commands_lost,
            "reports_again": self._reports_again,
            "clock_jump": self._clock_jump,
            "supervisor_crash": self._supervisor_crash,
            "supervisor_ended": self._supervisor_ended,
            "engine_lies": self._engine_lies,
            "engine_withdraws": self._engine_withdraws,
            "devices_change": self._devices_change,
            "unfit_node": self._unfit_node,
            "bad_link": self._bad_link,
            "corrupt_checkpoint": self._corrupt_checkpoint,
            "crash_loop": self._crash_loop,
            "hang": self._hang,
            "keeper_killed": self._keeper_killed,
            "unkillable": self._unkillable,
            "unfreezable": self._unfreezable,
        }
        assert self._by_kind.keys() == FAULT_KINDS.keys()

    def inject(self, kind: str, node: DrillNode | None = None) -> bool:
        """Inject one fault on this or a random node."""
        cluster = self._cluster
        node = node or self._dice.choice(list(cluster.nodes.values()))
        states = self._states(kind, node)
        if not self._by_kind[kind](node):
            return False
        if kind not in _COUNTED_LATER:
            self._count(kind, states)
        return True

    def _count(self, kind: str, states: Iterable[str]) -> None:
        self._cluster.coverage.count_fault(kind, states)
        self._cluster.count_event(f"fault {kind}")

    def _states(self, kind: str, node: DrillNode) -> list[str]:
        """Return the states of the affected attempts: those on the node, or all for a fault of the head."""
        head = self._cluster.head
        if head is None:
            return []
        world = head.controller.world
        found = world.attempts.values() if kind in _OF_THE_HEAD else world.attempts_on(node.id)
        return sorted({attempt.state.value for attempt in found})

    def _later(self, what: Callable[[], None]) -> None:
        self._cluster.call_after(self._dice.choice(FAULT_DURATIONS_S), what)

    # ---- the head ------------------------------------------------------------------------------------------------------

    def _restart_head(self) -> None:
        if self._cluster.head is None:
            self._cluster.start_head()

    def _head_crash(self, _: DrillNode) -> bool:
        if self._cluster.head is None:
            return False
        self._cluster.kill_head()
        self._later(self._restart_head)
        return True

    def _crash_in_commit(self, crash: CommitCrash) -> bool:
        if self._cluster.head is None:
            return False
        self._cluster.store.next_crash = crash
        return True

    def _head_died(self, world: World, crash: CommitCrash) -> None:
        """Count an injected death in a commit, by the states that the step would have produced."""
        kind = {CommitCrash.BEFORE: "head_crash_before_write", CommitCrash.AFTER: "head_crash_after_write"}.get(
            crash, "torn_write"
        )
        self._count(kind, sorted({attempt.state.value for attempt in world.attempts.values()}))
        self._later(self._restart_head)

    def _head_stop(self, _: DrillNode) -> bool:
        """Stop the head as planned, with long leases first as in `phalanx down --keep-jobs`."""
        cluster = self._cluster
        if cluster.head is None:
            return False
        cluster.leases_until_s = cluster.clock.boot_s + LONG_LEASE_S + LONG_LEASES_GRANTED_WITHIN_S + MARGIN_S
        try:
            until_s = cluster.clock.boot_s + LONG_LEASES_GRANTED_WITHIN_S
            cluster.request(PreparePlannedStop(lease_s=LONG_LEASE_S, grants_until_s=until_s))
        except TryLater:
            return False
        head = cluster.head

        def stop() -> None:
            if cluster.head is head and self.active:
                cluster.kill_head()
                self._later(self._restart_head)

        cluster.call_after(STOP_DELAY_S, stop)
        return True

    def _disk_full(self, _: DrillNode) -> bool:
        self._cluster.store.full_commits = self._dice.randint(1, 4)
        return self._cluster.head is not None

    def _slow_disk(self, _: DrillNode) -> bool:
        self._cluster.commit_s = self._dice.choice((0.05, 0.4))
        self._later(lambda: setattr(self._cluster, "commit_s", 0.0))
        return self._cluster.head is not None

    def _clock_jump(self, _: DrillNode) -> bool:
        """Set the wall clock; no attempt may end by it (invariant 15). Skipped while a deadline in Unix time is in transit or a window exists."""
        cluster = self._cluster
        if cluster.head is None or cluster.world.reservations or cluster.answer_delay_s() > 0:
            return False
        jobs, live = cluster.world.jobs, cluster.world.attempts.values()
        if any(jobs[one.job_id].spec.time_limit_s is not None and one.running_s is None for one in live):
            return False
        if not cluster.try_turn([]):  # process what is due anyway
            return False
        before = self._endings()
        cluster.jump_clock(self._dice.choice((-86400.0, -3.0, 3.0, 86400.0)))
        if not cluster.try_turn([]):
            return True
        after = self._endings()
        changed = {
            job: (ending, after.get(job, "gone")) for job, ending in before.items() if after.get(job, "gone") != ending
        }
        ours = {job: pair for job, pair in changed.items() if pair[1] not in _BY_SCHEDULER}
        require(not ours, 15, f"a jump of the clock ended {ours}")
        return True

    def _endings(self) -> dict[JobId, EndCause | None]:
        """Return the ending of each attempt. Stops by the scheduler do not count: they may have been due anyway."""
        return {job: attempt.stop_cause for job, attempt in self._cluster.world.attempts.items()}

    # ---- nodes ---------------------------------------------------------------------------------------------------------

    def _node_death(self, node: DrillNode, *, silent: bool) -> bool:
        if not node.alive:
            return False
        self._cluster.kill_node(node.id, silent=silent)
        self._later(lambda: self._cluster.revive_node(node.id))
        return True

    def _late_report(self, node: DrillNode) -> bool:
        """Delay the engine's report; the next incarnation may have started by then."""
        self._cluster.engine_late_s = self._dice.choice((1.0, 5.0, 9.0))
        done = self._node_death(node, silent=False)
        self._cluster.engine_late_s = 0.0
        return done

    def _freeze(self, node: DrillNode) -> bool:
        if not node.alive or node.paused or node.unfreezable:
            return False
        node.pause()
        self._later(node.resume)
        return True

    def _supervisor_crash(self, node: DrillNode) -> bool:
        """Crash the supervisor; its ranks run until keeper and engine have swept them, long before the lease ends."""
        if not node.alive or node.paused:
            return False
        node.crash_supervisor()

        def sweep() -> None:
            if node.has_orphans:
                node.power_off()
                self._cluster.report_death(node)

        self._cluster.call_after(self._dice.choice((0.02, 0.3, 1.0)), sweep)
        self._later(lambda: self._cluster.revive_node(node.id))
        return True

    def _supervisor_ended(self, node: DrillNode) -> bool:
        if not node.alive or node.paused:
            return False
        node.terminate()
        self._cluster.call_after(40.0, lambda: self._cluster.revive_node(node.id))
        self._later(lambda: self._cluster.revive_node(node.id))
        return True

    def _devices_change(self, node: DrillNode) -> bool:
        """Restart the node with an unhealthy or missing device; the next such fault repairs it."""
        if not node.alive or node.paused:
            return False
        whole = self._cluster.original_nodes[node.id]
        self._cluster.kill_node(node.id)
        if node.record.devices != whole.devices:
            devices = whole.devices
        elif self._dice.random() < 0.5:
            devices = whole.devices[:-1]
        else:
            devices = (replace(whole.devices[0], healthy=False), *whole.devices[1:])
        node.record = replace(node.record, devices=devices)
        self._later(lambda: self._cluster.revive_node(node.id))
        return True

    def _unfit_node(self, node: DrillNode) -> bool:
        if node.id in self._cluster.refusing_nodes:
            return False
        self._cluster.refusing_nodes[node.id] = self._dice.choice(("?the disk is full", "the driver hangs"))

        def repair() -> None:
            self._cluster.refusing_nodes.pop(node.id, None)

        self._later(repair)
        return True

    # ---- the network ---------------------------------------------------------------------------------------------------

    def _cut(self, *ways: NetworkDirection) -> bool:
        for way in ways:
            way.cut = True

        def repair() -> None:
            for way in ways:
                way.cut = False

        self._later(repair)
        return True

    def _bad_ways(self, node: DrillNode, **how: float) -> bool:
        """Degrade one or both directions."""
        ways = self._dice.choice(((node.link.up,), (node.link.down,), (node.link.up, node.link.down)))

        def set_all(values: dict[str, float]) -> None:
            for way in ways:
                for name, value in values.items():
                    setattr(way, name, value)

        set_all(how)
        usual = {"latency_s": LATENCY_S}
        self._later(lambda: set_all({name: usual.get(name, 0.0) for name in how}))
        return True

    def _bad_link(self, node: DrillNode) -> bool:
        """Break the connection between two nodes."""
        other = self._dice.choice([one for one in self._cluster.nodes if one != node.id])
        pair = {str(node.id), str(other)}
        self._cluster.bad_links.append(pair)

        def repair() -> None:
            if pair in self._cluster.bad_links:
                self._cluster.bad_links.remove(pair)

        self._later(repair)
        return True

    def _commands_lost(self, node: DrillNode) -> bool:
        keeps_every, count = self._dice.randint(1, 3) + 1, 0

        def drop(command: object) -> bool:
            nonlocal count
            del command
            count += 1
            return count % keeps_every != 0

        self._cluster.drop_command = drop
        self._later(lambda: setattr(self._cluster, "drop_command", lambda _: False))
        return node.alive

    def _reports_again(self, _: DrillNode) -> bool:
        """Repeat old reports, late and out of order."""
        if self._cluster.head is None:
            return False
        recent = [event for event in self._cluster.committed_events[-240:] if hasattr(event, "generation")]
        pick, many = self._dice.randint(0, 60), self._dice.randint(1, 8)
        again = recent[-pick - many : len(recent) - pick]
        if again:
            self._cluster.try_turn(again)
        return bool(again)

    # ---- the engine ----------------------------------------------------------------------------------------------------

    def _engine_lies(self, node: DrillNode) -> bool:
        """Report a false death as the port allows: unconfirmed for a live supervisor, or confirmed for an earlier incarnation."""
        if self._cluster.head is None or not node.alive:
            return False
        if node.incarnation > 1 and self._dice.random() < 0.5:
            before = SupervisorId(f"{node.id}-life{node.incarnation - 1}")
            known = self._cluster.world.nodes.get(node.id)
            if known is not None and known.supervisor_id == node.supervisor_id:
                self._cluster.try_turn([NodeDied(node_id=node.id, supervisor_id=before, why="it died", confirmed=True)])
                return True
        self._cluster.try_turn(
            [NodeDied(node_id=node.id, supervisor_id=None, why="it does not answer", confirmed=False)]
        )
        return True

    def _engine_withdraws(self, node: DrillNode) -> bool:
        """Withdraw a gang that was never complete; supervisors that know it drop it."""
        for attempt in self._live(node):
            never_whole = (
                any(member.state is MemberState.REQUESTED for member in attempt.members) and attempt.generation == 0
            )
            if attempt.state in FAULT_KINDS["engine_withdraws"] and never_whole:
                cause = self._dice.choice((EndCause.CONTENDED, EndCause.START_FAIL, EndCause.FAILED))
                why = "another job took the nodes"
                gone = AttemptWithdrawn(
                    job_id=attempt.job_id, epoch=attempt.epoch, why=why, nodes=(node.id,), cause=cause
                )
                self._cluster.try_turn([gone])
                return True
        return False

    # ---- processes -----------------------------------------------------------------------------------------------------

    def _live(self, node: DrillNode) -> list[Attempt]:
        return [] if self._cluster.head is None else self._cluster.world.attempts_on(node.id)

    def _corrupt_checkpoint(self, node: DrillNode) -> bool:
        """Corrupt the newest checkpoint of a job, while no rank is about to load it."""
        for attempt in self._live(node):
            kept = [
                one
                for one in self._cluster.world.jobs[attempt.job_id].checkpoints
                if one.digest not in self._cluster.corrupt_checkpoints
            ]
            if kept and attempt.state in FAULT_KINDS["corrupt_checkpoint"]:
                self._cluster.corrupt_checkpoints.add(kept[-1].digest)
                return True
        return False

    def _crash_loop(self, node: DrillNode) -> bool:
        """From now on rank 0 of a job crashes within a second of every start."""
        for attempt in self._live(node):
            if attempt.state in _PROCESSES and attempt.job_id not in self._cluster.crash_looping:
                self._cluster.crash_looping.add(attempt.job_id)
                return True
        return False

    def _hang(self, node: DrillNode) -> bool:
        """Hang the ranks of a member on this node; the supervisor is notified later."""
        running = {one.job_id for one in self._live(node) if one.state is _S.RUNNING}
        keys = list(dict.fromkeys(key for key, _ in node.tasks if key.job_id in running))
        if not keys or not node.alive or node.paused:
            return False
        key = self._dice.choice(keys)
        for task in node.processes.tasks_of(key):
            node.processes.suspend(task)
        silence = Hang(silent_s=HANG_NOTICED_S, limit_s=HANG_NOTICED_S, step=None)
        for again in range(3):  # repeated until handled, as the shell does
            node.deliver_later(HANG_NOTICED_S * (1 + again), HangDetected(key=key, hang=silence))
        return True

    def _keeper_killed(self, node: DrillNode) -> bool:
        keys = list(dict.fromkeys(key for key, _ in node.tasks))
        if not keys or not node.alive or node.paused:
            return False
        node.processes.break_keeper(self._dice.choice(keys))
        return True

    def _unkillable(self, node: DrillNode) -> bool:
        if not node.tasks or not node.alive:
            return False
        node.processes.unkillable = True
        self._later(lambda: setattr(node.processes, "unkillable", False))
        return True

    def _unfreezable(self, node: DrillNode) -> bool:
        """Make ranks unfreezable. Not on a paused node: its ranks would resume unchecked, since simulated ranks read no lease page."""
        if not node.tasks or not node.alive or node.paused:
            return False
        node.unfreezable = True
        self._later(lambda: setattr(node, "unfreezable", False))
        return True


_COUNTED_LATER: Final = frozenset({"head_crash_before_write", "head_crash_after_write", "torn_write"})
_OF_THE_HEAD: Final = _COUNTED_LATER | {
    "head_crash",
    "head_stop",
    "disk_full",
    "slow_disk",
    "clock_jump",
    "reports_again",
    "commands_lost",
}
