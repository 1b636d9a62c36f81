"""The Slurm engine: nodes come from Slurm's inventory, and each attempt is a Slurm job with one supervisor on each node.

One thread polls Slurm and acts on attempts; `follow` and `observe` only pass values to and from it. `orders` and `inventory` hold its
decisions, `render` and `parse` the command lines and their output.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from phalanx.core.errors import PhalanxError
from phalanx.core.fleet.node import Cordon, Node, NodeState
from phalanx.core.ids import Epoch, JobId, NodeId
from phalanx.core.state.events import Event
from phalanx.core.state.reports import AttemptWithdrawn, NodeDied, NodeListed
from phalanx.core.work.attempt import Attempt, EndCause
from phalanx.core.work.job import Job
from phalanx.core.work.states import AttemptState
from phalanx.engines.observations import Observations
from phalanx.engines.slurm import (
    commands,
    inventory,
    parse,
    render,
    sbatch_request,
    submissions,
)
from phalanx.engines.slurm.inventory import OurUsage
from phalanx.engines.slurm.limits import LimitScope, SlurmLimit
from phalanx.engines.slurm.options import ENGINE_NAME
from phalanx.engines.slurm.parse import SlurmJob, SlurmNode, SlurmPartition
from phalanx.engines.slurm.sbatch_request import SlurmSettings
from phalanx.engines.slurm.submissions import SlurmSubmission, SubmissionPhase
from phalanx.ports.engine import Admission, Discovery
from phalanx.wire.seat import SEAT_VARIABLE, encode_assignment

POLL_BUSY_S: Final = 0.5  # poll interval while a job of ours starts or ends: two commands of about 25 ms each
POLL_S: Final = 2.0  # poll interval otherwise; other users' jobs are seen this late
PARTITION_S: Final = 10.0  # a partition that is closed or opened by an administrator is noticed this late
TOPOLOGY_S: Final = 300.0  # switches are rewired rarely
FIRST_ANSWER_S: Final = 2.0  # for Slurm to answer a starting head: its supervisors wait, and a takeover has 9 s in all
RESIDENT_POLL_S: Final = 30.0  # where it has only jobs to cancel that an earlier head left
CONTENDED_S: Final = 30.0  # a node that Slurm gave to others counts as taken for this long, whatever Slurm shows
_STRAY: Final = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED")  # a job that is ending needs no scancel
_Key = tuple[JobId, Epoch]
_log = logging.getLogger("phalanx.engines.slurm")


@dataclass(slots=True, kw_only=True)
class SlurmEngine:
    """Runs attempts as Slurm jobs.

    Args:
        settings: how this head uses Slurm.
        key_of: makes an attempt's key for its supervisors.
        memory_of: returns the memory of a device of a GRES type, in bytes.
        lists_nodes: jobs run on Slurm's nodes; else in resident jobs (`resident_jobs`), which are nodes of a pool.
    """

    settings: SlurmSettings
    key_of: Callable[[JobId, Epoch], str]
    memory_of: Callable[[str], int] = lambda _: 0
    lists_nodes: bool = True
    _updates: queue.SimpleQueue[tuple[Job, Attempt]] = field(default_factory=queue.SimpleQueue)
    _events: Observations[Event] = field(default_factory=Observations)
    _orders: dict[_Key, SlurmSubmission] = field(default_factory=dict)
    _requests: dict[_Key, render.SlurmJobRequest] = field(default_factory=dict)
    _slurm: dict[str, SlurmNode] = field(default_factory=dict)
    _reported: dict[NodeId, Node | None] = field(default_factory=dict)
    _contended: dict[NodeId, tuple[float, str]] = field(default_factory=dict)
    _switch_labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    _switch_labels_s: float = float("-inf")
    _partition: SlurmPartition | None = None
    _partition_s: float = float("-inf")
    _unreachable: bool = False
    _listed: bool = False  # Slurm has answered, and the events of its nodes have been queued
    _jobs_unmatched: bool = False  # the Slurm jobs of adopted attempts are not found yet
    _wake: threading.Event = field(default_factory=threading.Event)
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        """The engine's name."""
        return ENGINE_NAME

    def discover(self, known: Sequence[Node], live: Sequence[tuple[Job, Attempt]]) -> Discovery:
        """Find the Slurm jobs of live attempts, and cancel those of ended attempts.

        If Slurm does not answer, the head starts without it, because running jobs need their leases. The first answered poll completes this.
        """
        now_s, elsewhere = (
            time.monotonic(),
            {node.id for node in known if node.engine != ENGINE_NAME or not node.per_attempt},
        )
        ours = [node for node in known if node.id not in elsewhere]
        self._reported = {node.id: node if node.state is NodeState.UP else None for node in ours if self.lists_nodes}
        for job, attempt in live:
            if elsewhere.isdisjoint(grant.node_id for grant in attempt.allocation.grants):
                key = (job.id, attempt.epoch)
                self._orders[key] = SlurmSubmission(
                    attempt=attempt, slurm_id="", since_s=now_s, phase=SubmissionPhase.STARTED
                )
        self._jobs_unmatched = True
        try:
            self._poll(FIRST_ANSWER_S)
        except (PhalanxError, OSError) as error:
            self._mark_unreachable(str(error))
        if not self.lists_nodes:
            why = "jobs run in resident Slurm jobs now"
            return Discovery(
                deaths=[NodeDied(node_id=node.id, supervisor_id=None, why=why, confirmed=False) for node in ours],
                retired=[node.id for node in ours],
            )
        return Discovery()  # the inventory comes with the polls

    def admit(self, node_id: NodeId, address: str, hostname: str) -> Admission | None:
        """Admit no server: nodes come and go in Slurm."""

    def open(self) -> None:
        """Start polling Slurm."""
        if self._thread is not None:
            return
        self._thread = threading.Thread(target=self._run, name="slurm-engine", daemon=True)
        self._thread.start()

    def close(self, *, keep_nodes: bool) -> None:
        """Stop polling; unless `keep_nodes`, cancel all our Slurm jobs."""
        self._ended.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=commands.ANSWER_S)
        left = [order.slurm_id for order in self._orders.values() if order.slurm_id]
        if left and not keep_nodes:
            try:
                self._cancel(left)
            except (PhalanxError, OSError) as error:  # the next head finds them by their comment
                _log.warning("Could not cancel Slurm jobs %s: %s", ", ".join(left), error)

    def expected_nodes(self) -> list[NodeId] | None:
        """Return no node, as all come by `observe`; None before Slurm's first answer."""
        return [] if self._listed else None

    def follow(self, job: Job, attempt: Attempt) -> None:
        """Queue an attempt whose newest record is durable."""
        ours = all(grant.node_id in self._slurm for grant in attempt.allocation.grants)
        if ours or (job.id, attempt.epoch) in self._orders:  # its node may have left the partition since
            self._updates.put((job, attempt))
            self._wake.set()

    def observe(self) -> list[Event]:
        """Return the events since the last call."""
        return self._events.take()

    def listen(self, wake: Callable[[], None]) -> None:
        """Call `wake` after each event."""
        self._events.listen(wake)

    # ---- the thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        looked_s = time.monotonic()
        while not self._ended.is_set():
            try:
                self._drain_updates()
                pause_s = (
                    POLL_BUSY_S
                    if any(map(self._is_changing, self._orders.values()))
                    else POLL_S
                    if self.lists_nodes
                    else RESIDENT_POLL_S
                )
                left_s = looked_s + pause_s - time.monotonic()
                if left_s > 0:
                    self._wake.wait(left_s)
                    self._wake.clear()
                    continue
                looked_s = time.monotonic()
                self._poll()
            except (PhalanxError, OSError) as error:
                self._mark_unreachable(str(error))
                self._ended.wait(POLL_S)

    def _mark_unreachable(self, why: str) -> None:
        """Cordon all nodes while Slurm does not answer. Running jobs continue, governed by their leases."""
        if self._unreachable:
            return
        _log.warning("Slurm does not answer; its nodes get no new jobs: %s", why)
        self._unreachable = True
        cordon = Cordon(by=ENGINE_NAME, why=f"Slurm's controller does not answer ({why})", since_s=0.0)
        for node_id, node in self._reported.items():
            if node is not None:
                self._reported[node_id] = excluded = replace(node, cordon=cordon)
                self._events.append(NodeListed(node=excluded))

    def _mark_reachable(self, now_s: float) -> None:
        """Record that Slurm answers."""
        if self._unreachable:
            _log.info("Slurm answers again")
            self._unreachable = False
            self._orders = {key: submissions.after_outage(order, now_s) for key, order in self._orders.items()}

    @staticmethod
    def _is_changing(order: SlurmSubmission) -> bool:
        return (
            order.phase is SubmissionPhase.QUEUED
            or order.attempt_ended_s is not None
            or order.slurm_ended_s is not None
        )

    def _drain_updates(self) -> None:
        while not self._updates.empty():
            job, attempt = self._updates.get()
            key = (job.id, attempt.epoch)
            order = self._orders.get(key)
            if order is not None:
                ended_s = (
                    order.attempt_ended_s
                    if attempt.holds_allocation or order.attempt_ended_s is not None
                    else time.monotonic()
                )
                self._orders[key] = order = replace(order, attempt=attempt, attempt_ended_s=ended_s)
                if submissions.has_lost_members(attempt) and order.slurm_id and not order.cancelled:
                    # Cancelled at once, not at the next poll: the next attempt may already be queued, perhaps on the same nodes.
                    self._orders[key] = replace(order, cancelled=True, cancel_unconfirmed=True)
                    commands.run(render.kill_command(order.slurm_id))
                    self._cancel([order.slurm_id])
            elif attempt.state is AttemptState.PLACED and attempt.generation == 0:
                try:
                    self._submit(job, attempt)
                except (
                    PhalanxError,
                    OSError,
                ) as error:  # if Slurm did accept the job, the next poll cancels it as a stray
                    self._mark_unreachable(str(error))
                    self._withdraw(attempt, f"could not submit to Slurm: {error}", EndCause.CONTENDED)

    def _withdraw(self, attempt: Attempt, why: str, cause: EndCause) -> None:
        nodes = tuple(grant.node_id for grant in attempt.allocation.grants)
        self._events.append(
            AttemptWithdrawn(job_id=attempt.job_id, epoch=attempt.epoch, why=why, nodes=nodes, cause=cause)
        )

    def _submit(self, job: Job, attempt: Attempt) -> None:
        left = [grant.node_id for grant in attempt.allocation.grants if grant.node_id not in self._slurm]
        if left:
            self._withdraw(attempt, f"{', '.join(left)} is no longer in the Slurm partition", EndCause.START_FAIL)
            return
        time_max = "" if self._partition is None else self._partition.max_time
        ask = sbatch_request.build_sbatch_request(self.settings, job, attempt, self._slurm, time_max)
        refusal = render.time_limit_problem(ask, job.spec.time_limit_s)
        if refusal:
            self._withdraw(attempt, refusal, EndCause.FAILED)
            return
        argv, script = render.submit_command(ask)
        seats = sbatch_request.seat_assignment(self.settings, attempt, self._slurm, self.key_of(job.id, attempt.epoch))
        done = commands.run(argv, given=script, more={SEAT_VARIABLE: encode_assignment(seats)})
        if done.code != 0:
            _log.warning("job %s attempt %d: sbatch failed: %s", job.id, attempt.epoch, done.why)
            if sbatch_request.is_unreachable(done.why):
                self._mark_unreachable(done.why)
            self._withdraw(attempt, *sbatch_request.explain_refusal(ask, done.why))
            return
        slurm_id = done.stdout.strip().partition(";")[0]
        key = (job.id, attempt.epoch)
        self._orders[key] = SlurmSubmission(attempt=attempt, slurm_id=slurm_id, since_s=time.monotonic())
        self._requests[key] = ask
        _log.info("job %s attempt %d is Slurm job %s", job.id, attempt.epoch, slurm_id)

    # ---- polling --------------------------------------------------------------------------------------------------------

    def _poll(self, first_answer_s: float = commands.ANSWER_S) -> None:
        now_s = time.monotonic()
        reread = self._jobs_unmatched or now_s - self._partition_s >= PARTITION_S
        if reread:
            self._partition = self._find_partition(first_answer_s)
            self._partition_s = now_s
        jobs = _queue()
        nodes = parse.parse_nodes(commands.output_of(render.SHOW_NODES))
        self._mark_reachable(now_s)
        if self._jobs_unmatched:
            self._match_jobs(jobs)
        self._drain_updates()  # attempts that ended since: the state of their Slurm jobs is our own doing
        if now_s - self._switch_labels_s >= TOPOLOGY_S:
            self._switch_labels_s = now_s
            shown = commands.run(render.SHOW_TOPOLOGY)  # fails if Slurm has no switch tree
            self._switch_labels = parse.parse_topology(shown.stdout) if shown.code == 0 else {}
        wanted = self.settings.partition or (self._partition.name if self._partition is not None else "")
        self._slurm = {
            node.name: node for node in nodes if self.lists_nodes and (not wanted or wanted in node.partitions)
        }
        reports, cancels, nudges = self._evaluate_orders(jobs, now_s)
        # Nodes come first, so that requeued jobs are not placed on nodes that others took.
        self._events.extend(self._node_events(jobs, now_s, repeat_cordons=reread and self._listed))
        self._listed = True
        self._events.extend(reports)
        # Commands come last: an error in one must not lose reports that the orders count as sent.
        if cancels:
            self._cancel(cancels)
        for key, slurm_id in nudges:
            if not self._unreachable:
                commands.run(render.nudge_command(slurm_id, render.job_comment(self.settings.tag, *key)))

    def _match_jobs(self, jobs: Sequence[SlurmJob]) -> None:
        """Find the Slurm jobs of adopted attempts by their comments; those of ended attempts are strays."""
        mine = {named[1:]: job.id for job in jobs if (named := self._parse_ours(job)) is not None and not job.has_ended}
        for key, order in self._orders.items():
            found = mine.get(key, "")
            self._orders[key] = replace(
                order, slurm_id=found, missed_polls=0 if found else submissions.MISSED_POLLS_MAX
            )
        self._jobs_unmatched = False

    def _cancel(self, slurm_ids: Sequence[str]) -> None:
        """Cancel Slurm jobs. A failed cancel is repeated at the next poll.

        Raises:
            TryLater: Slurm does not answer in time.
        """
        done = commands.run(render.cancel_command(slurm_ids))
        if done.code != 0:
            _log.warning("scancel of Slurm jobs %s failed: %s", ", ".join(slurm_ids), done.why)
            return
        for key, order in list(self._orders.items()):
            if order.slurm_id in slurm_ids:
                self._orders[key] = replace(order, cancel_unconfirmed=False)

    def _evaluate_orders(
        self, jobs: Sequence[SlurmJob], now_s: float
    ) -> tuple[list[Event], list[str], list[tuple[_Key, str]]]:
        """Return the events to report, the Slurm jobs to cancel, and those to nudge. Runs no command."""
        rows = {job.id: job for job in jobs}
        gone = [node.name for node in self._slurm.values() if node.down_reason]
        ours = self._our_ids(jobs)
        mine = [job for job in jobs if job.id in ours]
        reports: list[Event] = []
        cancels: list[str] = []
        nudges: list[tuple[_Key, str]] = []
        for key, order in list(self._orders.items()):
            row = rows.get(order.slurm_id)
            holders = [who for node in order.nodes for who in inventory.other_users(node, jobs, ours)]
            evaluation = submissions.evaluate(
                order,
                row,
                now_s,
                down_nodes=gone,
                holders=list(dict.fromkeys(holders)),
                python=self.settings.supervisor[0],
                head_url=self.settings.head_url,
                partition="" if self._partition is None else self._partition.name,
                cleaning_up=any(job.id != order.slurm_id and job.is_cleaning_up(order.nodes) for job in mine),
            )
            reports += evaluation.events
            if evaluation.cancel:
                cancels.append(order.slurm_id)
            if evaluation.nudge:
                nudges.append((key, order.slurm_id))
            if evaluation.limit is not None:
                self._apply_limit(key[0], evaluation.limit, now_s)
            for node in evaluation.contended:
                self._contended[node] = (now_s + CONTENDED_S, f"jobs that Slurm prefers to job {key[0]}")
            if evaluation.submission is None or (
                evaluation.submission.phase is SubmissionPhase.SETTLED
                and evaluation.submission.attempt_ended_s is not None
            ):
                del self._orders[key]
                self._requests.pop(key, None)
            else:
                self._orders[key] = evaluation.submission
        return reports, list(dict.fromkeys([*cancels, *self._strays(jobs)])), nudges

    def _apply_limit(self, job_id: JobId, limit: SlurmLimit, now_s: float) -> None:
        """Keep other jobs from meeting the same limit: close all nodes, or count all GPUs as taken for a while.

        Usage counts for the account or QOS. If these differ from job to job, a limit says nothing about other jobs.
        """
        if limit.scope is LimitScope.CLOSED and self._partition is not None:
            self._partition = replace(self._partition, state=limit.reason.removeprefix("Partition").upper())
        elif limit.scope is LimitScope.USAGE and not render.is_pattern(self.settings.account + self.settings.qos):
            until = (now_s + CONTENDED_S, f"others, by Slurm's limit {limit.reason} (job {job_id})")
            self._contended.update({NodeId(name): until for name in self._slurm})

    def _strays(self, jobs: Sequence[SlurmJob]) -> list[str]:
        """Return our Slurm jobs without an order: of ended attempts, or of a submit that failed midway."""
        found = []
        for job in jobs:
            named = self._parse_ours(job)
            if named is not None and named[1:] not in self._orders and job.state in _STRAY:
                found.append(job.id)
        return found

    def _node_events(self, jobs: Sequence[SlurmJob], now_s: float, *, repeat_cordons: bool) -> list[Event]:
        """Return events for the nodes that changed since the last poll."""
        ours, rows = self._our_ids(jobs), {job.id: job for job in jobs}
        self._contended = {node: mark for node, mark in self._contended.items() if mark[0] > now_s}
        reports: list[Event] = []
        for slurm in self._slurm.values():
            node_id = NodeId(slurm.name)
            if slurm.down_reason:
                if self._reported.get(node_id) is not None or node_id not in self._reported:
                    self._reported[node_id] = None
                    reports.append(
                        NodeDied(node_id=node_id, supervisor_id=None, why=slurm.down_reason, confirmed=False)
                    )
                continue
            granted, begun = self._usage_on(node_id, rows)
            node = inventory.fleet_node(
                slurm,
                granted=granted,
                allocated=begun,
                jobs=jobs,
                our_job_ids=ours,
                contended=self._contended.get(node_id, (0.0, ""))[1],
                partition=self._partition,
                labels=self._switch_labels.get(slurm.name),
                memory_of=self.memory_of,
            )
            # A cordon is repeated: an operator's own cordon hides it, and may have ended since.
            if self._reported.get(node_id) != node or (repeat_cordons and node.cordon is not None):
                self._reported[node_id] = node
                reports.append(NodeListed(node=node))
        removed = [
            node_id for node_id, node in self._reported.items() if node is not None and node_id not in self._slurm
        ]
        for node_id in removed:
            self._reported[node_id] = None
            why = "it is no longer in the Slurm partition"
            reports.append(NodeDied(node_id=node_id, supervisor_id=None, why=why, confirmed=False))
        return reports

    def _usage_on(self, node_id: NodeId, rows: Mapping[str, SlurmJob]) -> tuple[OurUsage, OurUsage]:
        """Return what the head granted on a node, and the part of it that Slurm counts as allocated to us."""
        granted, begun = OurUsage(), OurUsage()
        for key, order in self._orders.items():
            grant = order.attempt.allocation.grant_on(node_id)
            if grant is None:
                continue
            if order.attempt.holds_allocation and order.phase is not SubmissionPhase.SETTLED:
                granted = replace(granted, devices=granted.devices | set(grant.devices))
            row = rows.get(order.slurm_id)
            if row is None or not row.has_nodes:
                continue
            ask = self._requests.get(key)
            asked = next((one for one in ask.grants if one.node_id == node_id), grant) if ask is not None else grant
            begun = OurUsage(
                devices=begun.devices | set(grant.devices),
                cpus=begun.cpus + asked.cpus,
                memory_bytes=begun.memory_bytes + asked.memory_bytes,
            )
        return granted, begun

    def _our_ids(self, jobs: Sequence[SlurmJob]) -> frozenset[str]:
        return frozenset(job.id for job in jobs if self._parse_ours(job) is not None)

    def _parse_ours(self, job: SlurmJob) -> tuple[str, JobId, Epoch] | None:
        named = render.parse_comment(job.comment)
        return named if named is not None and named[0] == self.settings.tag else None

    def _find_partition(self, within_s: float) -> SlurmPartition | None:
        found = parse.parse_partitions(commands.output_of(render.SHOW_PARTITIONS, within_s=within_s))
        wanted = self.settings.partition
        return next((one for one in found if (one.name == wanted if wanted else one.default)), None)


def _queue() -> tuple[SlurmJob, ...]:
    """Return Slurm's queue.

    Raises:
        TryLater: Slurm does not answer.
        SlurmOutputError: its output cannot be parsed.
    """
    mark = f"|{secrets.token_hex(8)}|"
    return parse.parse_jobs(commands.output_of(render.list_jobs_command(mark)), mark)
