"""The Slurm engine: nodes from Slurm's inventory, one Slurm job for each attempt, and in it a supervisor for each node that calls home.

One thread looks at Slurm every now and then and does what attempts need; `follow` and `observe` only hand over. What it decides stands in
`orders` and `inventory`; what it says to Slurm in `render` and `parse`.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from phalanx.core.errors import PhalanxError
from phalanx.core.fleet.node import Cordon, Node, NodeState
from phalanx.core.ids import Epoch, JobId, NodeId
from phalanx.core.state.events import Event, NodeDead, NodeSeen, Withdrawn
from phalanx.core.work.attempt import Attempt, AttemptState, Cause
from phalanx.core.work.job import Job
from phalanx.engines.slurm import commands, handing, inventory, orders, parse, render
from phalanx.engines.slurm.handing import SlurmSettings
from phalanx.engines.slurm.inventory import ENGINE_NAME, Ours
from phalanx.engines.slurm.orders import Order, Phase
from phalanx.engines.slurm.parse import Partition, SlurmJob, SlurmNode
from phalanx.ports.engine import Capabilities
from phalanx.wire.seat import SEAT_VARIABLE, encode_order

LOOK_BUSY_S: Final = (
    0.5  # between two looks while a job of ours is on its way in or out: two commands of some 25 ms each
)
LOOK_S: Final = 2.0  # else; how late others' jobs are seen
TOPOLOGY_S: Final = 300.0  # switches are rewired rarely
FIRST_ANSWER_S: Final = 2.0  # of Slurm to a head that starts: its supervisors wait, and a takeover has 9 s in all
CONTENDED_S: Final = 30.0  # a node whose place went to others is believed taken for so long, whatever Slurm shows
_STRAY: Final = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED")  # one that is leaving needs no word
_Key = tuple[JobId, Epoch]
_log = logging.getLogger("phalanx.engines.slurm")


@dataclass(slots=True, kw_only=True)
class SlurmEngine:
    """Runs attempts as Slurm jobs.

    Args:
        settings: see there.
        key_of: makes an attempt's key for its supervisors.
        memory_of: memory of a device of a GRES type, in bytes.
    """

    settings: SlurmSettings
    key_of: Callable[[JobId, Epoch], str]
    memory_of: Callable[[str], int] = lambda _: 0
    _heard: queue.SimpleQueue[tuple[Job, Attempt]] = field(default_factory=queue.SimpleQueue)
    _said: deque[Event] = field(default_factory=deque)
    _orders: dict[_Key, Order] = field(default_factory=dict)
    _asked: dict[_Key, render.Ask] = field(default_factory=dict)
    _slurm: dict[str, SlurmNode] = field(default_factory=dict)
    _told: dict[NodeId, Node | None] = field(default_factory=dict)
    _contended: dict[NodeId, tuple[float, str]] = field(default_factory=dict)
    _places: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    _places_s: float = float("-inf")
    _partition: Partition | None = None
    _silent: bool = False
    _unfound: bool = False  # the Slurm jobs of adopted attempts are yet to be found
    _wake: threading.Event = field(default_factory=threading.Event)
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        """The engine's word."""
        return ENGINE_NAME

    @property
    def capabilities(self) -> Capabilities:
        """Slurm picks the devices, nodes share what the site shares, and each attempt has supervisors of its own."""
        return Capabilities(picks_devices=False, shares_files=False, revives_nodes=True, per_attempt=True)

    def nodes(self) -> list[NodeId]:
        """Nodes of the partition, by id."""
        return sorted(NodeId(name) for name in self._slurm)

    def start(self, node_id: NodeId) -> None:
        """Nothing: supervisors come with their attempts."""

    def stop(self, node_id: NodeId) -> None:
        """Nothing, as `start`."""

    def adopt(self, known: Sequence[Node], live: Sequence[tuple[Job, Attempt]]) -> None:
        """Before the first turn of a head: find the Slurm jobs of live attempts again, and end those of attempts that are over.

        While Slurm does not answer, the head leads without: what runs needs its leases. The first look that is answered does the rest.
        """
        now_s, elsewhere = time.monotonic(), {node.id for node in known if node.engine != ENGINE_NAME}
        ours = [node for node in known if node.id not in elsewhere]
        self._told = {node.id: node if node.state is NodeState.UP else None for node in ours}
        for job, attempt in live:
            if elsewhere.isdisjoint(grant.node_id for grant in attempt.allocation.grants):
                key = (job.id, attempt.epoch)
                self._orders[key] = Order(attempt=attempt, slurm_id="", since_s=now_s, phase=Phase.BEGUN)
        self._unfound = True
        try:
            self._look(FIRST_ANSWER_S)
        except (PhalanxError, OSError) as error:
            self._deaf(str(error))

    def open(self) -> None:
        """Look at Slurm from now on."""
        self._thread = threading.Thread(target=self._run, name="slurm-engine", daemon=True)
        self._thread.start()

    def close(self, *, keep_nodes: bool) -> None:
        """Stop looking; unless kept, end every Slurm job of ours."""
        self._ended.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=commands.ANSWER_S)
        left = [order.slurm_id for order in self._orders.values() if order.slurm_id]
        if left and not keep_nodes:
            try:
                self._cancel(left)
            except (PhalanxError, OSError) as error:  # the next head finds them by their comment
                _log.warning("Slurm jobs %s were not cancelled: %s", ", ".join(left), error)

    def follow(self, job: Job, attempt: Attempt) -> None:
        """An attempt's newest record is durable."""
        ours = all(grant.node_id in self._slurm for grant in attempt.allocation.grants)
        if ours or (job.id, attempt.epoch) in self._orders:  # its node may have left the partition meanwhile
            self._heard.put((job, attempt))
            self._wake.set()

    def observe(self) -> list[Event]:
        """What was seen since the last call."""
        seen = []
        while self._said:
            seen.append(self._said.popleft())
        return seen

    # ---- the thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        looked_s = time.monotonic()
        while not self._ended.is_set():
            try:
                self._hear()
                pause_s = LOOK_BUSY_S if any(self._moves(order) for order in self._orders.values()) else LOOK_S
                left_s = looked_s + pause_s - time.monotonic()
                if left_s > 0:
                    self._wake.wait(left_s)
                    self._wake.clear()
                    continue
                looked_s = time.monotonic()
                self._look()
            except (PhalanxError, OSError) as error:
                self._deaf(str(error))
                self._ended.wait(LOOK_S)

    def _deaf(self, why: str) -> None:
        """Slurm does not answer: until it does, nothing new is placed on its nodes. What runs there runs on, and its leases decide."""
        if self._silent:
            return
        _log.warning("Slurm: %s", why)
        self._silent = True
        cordon = Cordon(by=ENGINE_NAME, why=f"Slurm's controller does not answer ({why})", since_s=0.0)
        for node_id, node in self._told.items():
            if node is not None:
                self._told[node_id] = shut = replace(node, cordon=cordon)
                self._said.append(NodeSeen(node=shut))

    def _hears(self, now_s: float) -> None:
        """Slurm answers, perhaps again."""
        if self._silent:
            _log.info("Slurm answers again")
            self._silent = False
            self._orders = {key: orders.after_silence(order, now_s) for key, order in self._orders.items()}

    @staticmethod
    def _moves(order: Order) -> bool:
        return order.phase is Phase.QUEUED or order.ended_s is not None or order.over_s is not None

    def _hear(self) -> None:
        while not self._heard.empty():
            job, attempt = self._heard.get()
            key = (job.id, attempt.epoch)
            order = self._orders.get(key)
            if order is not None:
                ended_s = order.ended_s if attempt.live or order.ended_s is not None else time.monotonic()
                self._orders[key] = order = replace(order, attempt=attempt, ended_s=ended_s)
                if orders.bereft(attempt) and order.slurm_id and not order.cancelled:
                    # Now, not at the next look: the attempt after it, perhaps on the same nodes, is the next thing to be heard.
                    self._orders[key] = replace(order, cancelled=True, unheard=True)
                    commands.run(render.kill(order.slurm_id))
                    self._cancel([order.slurm_id])
            elif attempt.state is AttemptState.PLACED and attempt.generation == 0:
                try:
                    self._submit(job, attempt)
                except (PhalanxError, OSError) as error:  # Slurm may have taken it: a stray is ended at the next look
                    self._deaf(str(error))
                    self._back(attempt, f"Slurm was not asked: {error}", Cause.CONTENDED)

    def _back(self, attempt: Attempt, why: str, cause: Cause) -> None:
        nodes = tuple(grant.node_id for grant in attempt.allocation.grants)
        self._said.append(Withdrawn(job_id=attempt.job_id, epoch=attempt.epoch, why=why, nodes=nodes, cause=cause))

    def _submit(self, job: Job, attempt: Attempt) -> None:
        left = [grant.node_id for grant in attempt.allocation.grants if grant.node_id not in self._slurm]
        if left:
            self._back(attempt, f"Slurm no longer has {', '.join(left)} in the partition", Cause.START_FAIL)
            return
        time_max = "" if self._partition is None else self._partition.max_time
        ask = handing.ask_of(self.settings, job, attempt, self._slurm, time_max)
        refusal = render.too_long(ask, job.spec.time_limit_s)
        if refusal:
            self._back(attempt, refusal, Cause.FAILED)
            return
        argv, script = render.submit(ask)
        seats = handing.seats_of(self.settings, attempt, self._slurm, self.key_of(job.id, attempt.epoch))
        said = commands.run(argv, given=script, more={SEAT_VARIABLE: encode_order(seats)})
        if said.code != 0:
            _log.warning("job %s attempt %d: sbatch refused: %s", job.id, attempt.epoch, said.why)
            if handing.unheard(said.why):
                self._deaf(said.why)
            self._back(attempt, *handing.refusal_of(ask, said.why))
            return
        slurm_id = said.out.strip().partition(";")[0]
        key = (job.id, attempt.epoch)
        self._orders[key] = Order(attempt=attempt, slurm_id=slurm_id, since_s=time.monotonic())
        self._asked[key] = ask
        _log.info("job %s attempt %d is Slurm job %s", job.id, attempt.epoch, slurm_id)

    # ---- a look at Slurm ------------------------------------------------------------------------------------------------

    def _look(self, first_answer_s: float = commands.ANSWER_S) -> None:
        now_s = time.monotonic()
        if self._unfound:
            self._partition = self._find_partition(first_answer_s)
        jobs = _queue()
        nodes = parse.nodes_of(commands.ask(render.NODES))
        self._hears(now_s)
        if self._unfound:
            self._find_again(jobs)
        self._hear()  # ends that we were told of meanwhile: what the queue shows of them is our own doing
        if now_s - self._places_s >= TOPOLOGY_S:
            self._places_s = now_s
            said = commands.run(render.TOPOLOGY)  # fails where Slurm knows no tree
            self._places = parse.places_of(said.out) if said.code == 0 else {}
        wanted = self.settings.partition or (self._partition.name if self._partition is not None else "")
        self._slurm = {node.name: node for node in nodes if not wanted or wanted in node.partitions}
        reports, leaving, nudged = self._judge(jobs, now_s)
        self._said.extend(
            self._nodes_seen(jobs, now_s)
        )  # first: who is placed again must not be placed on what others took
        self._said.extend(reports)
        # Last: a command that breaks off must not lose what the orders say we have told.
        if leaving:
            self._cancel(leaving)
        for key, slurm_id in nudged:
            if not self._silent:
                commands.run(render.nudge(slurm_id, render.comment(self.settings.tag, *key)))

    def _find_again(self, jobs: Sequence[SlurmJob]) -> None:
        """The Slurm jobs of adopted attempts, by their comments; those of attempts that are over are strays."""
        mine = {named[1:]: job.id for job in jobs if (named := self._ours(job)) is not None and not job.over}
        for key, order in self._orders.items():
            found = mine.get(key, "")
            self._orders[key] = replace(order, slurm_id=found, unseen=0 if found else orders.GONE_LOOKS)
        self._unfound = False

    def _cancel(self, slurm_ids: Sequence[str]) -> None:
        """End these Slurm jobs. Those of orders whose end Slurm did not take are told again at the next look.

        Raises:
            TryLater: Slurm does not answer in time.
        """
        said = commands.run(render.cancel(slurm_ids))
        if said.code != 0:
            _log.warning("Slurm: scancel of %s: %s", ", ".join(slurm_ids), said.why)
            return
        for key, order in list(self._orders.items()):
            if order.slurm_id in slurm_ids:
                self._orders[key] = replace(order, unheard=False)

    def _judge(self, jobs: Sequence[SlurmJob], now_s: float) -> tuple[list[Event], list[str], list[tuple[_Key, str]]]:
        """What to report, which Slurm jobs to end, and which to have looked at again. Runs no command."""
        rows = {job.id: job for job in jobs}
        gone = [node.name for node in self._slurm.values() if node.gone]
        ours = self._our_ids(jobs)
        mine = [job for job in jobs if job.id in ours]
        reports: list[Event] = []
        leaving: list[str] = []
        nudged: list[tuple[_Key, str]] = []
        for key, order in list(self._orders.items()):
            row = rows.get(order.slurm_id)
            holders = [who for node in order.nodes for who in inventory.holders(node, jobs, ours)]
            verdict = orders.look(
                order, row, now_s, gone=gone, holders=list(dict.fromkeys(holders)), python=self.settings.supervisor[0],
                head_url=self.settings.head_url,
                clearing=any(job.id != order.slurm_id and job.clears(order.nodes) for job in mine),
            )  # fmt: skip
            reports += verdict.reports
            if verdict.cancel:
                leaving.append(order.slurm_id)
            if verdict.nudge:
                nudged.append((key, order.slurm_id))
            for node in verdict.contended:
                self._contended[node] = (now_s + CONTENDED_S, f"whoever Slurm prefers to job {key[0]}")
            if verdict.order is None or (verdict.order.phase is Phase.SETTLED and verdict.order.ended_s is not None):
                del self._orders[key]
                self._asked.pop(key, None)
            else:
                self._orders[key] = verdict.order
        return reports, list(dict.fromkeys([*leaving, *self._strays(jobs)])), nudged

    def _strays(self, jobs: Sequence[SlurmJob]) -> list[str]:
        """Jobs of ours that no order knows: of attempts that are over, or whose submit broke off."""
        found = []
        for job in jobs:
            named = self._ours(job)
            if named is not None and named[1:] not in self._orders and job.state in _STRAY:
                found.append(job.id)
        return found

    def _nodes_seen(self, jobs: Sequence[SlurmJob], now_s: float) -> list[Event]:
        """The inventory, as far as it has changed since it was told last."""
        ours, rows = self._our_ids(jobs), {job.id: job for job in jobs}
        self._contended = {node: mark for node, mark in self._contended.items() if mark[0] > now_s}
        reports: list[Event] = []
        for slurm in self._slurm.values():
            node_id = NodeId(slurm.name)
            if slurm.gone:
                if self._told.get(node_id) is not None or node_id not in self._told:
                    self._told[node_id] = None
                    reports.append(NodeDead(node_id=node_id, supervisor_id=None, why=slurm.gone, confirmed=False))
                continue
            granted, begun = self._held_on(node_id, rows)
            node = inventory.node_of(
                slurm, granted=granted, begun=begun, jobs=jobs, ours=ours, contended=self._contended.get(node_id, (0.0, ""))[1],
                labels=self._places.get(slurm.name), memory_of=self.memory_of,
            )  # fmt: skip
            if self._told.get(node_id) != node:
                self._told[node_id] = node
                reports.append(NodeSeen(node=node))
        for node_id in [
            node_id for node_id, told in self._told.items() if told is not None and node_id not in self._slurm
        ]:
            self._told[node_id] = None
            why = "Slurm no longer has it in the partition"
            reports.append(NodeDead(node_id=node_id, supervisor_id=None, why=why, confirmed=False))
        return reports

    def _held_on(self, node_id: NodeId, rows: Mapping[str, SlurmJob]) -> tuple[Ours, Ours]:
        """What the head granted on a node, and the part of it that Slurm counts as given to us."""
        granted, begun = Ours(), Ours()
        for key, order in self._orders.items():
            grant = order.attempt.allocation.on(node_id)
            if grant is None:
                continue
            if order.attempt.live and order.phase is not Phase.SETTLED:
                granted = replace(granted, devices=granted.devices | set(grant.devices))
            row = rows.get(order.slurm_id)
            if row is None or not row.holds:
                continue
            ask = self._asked.get(key)
            asked = next((one for one in ask.grants if one.node_id == node_id), grant) if ask is not None else grant
            begun = Ours(
                devices=begun.devices | set(grant.devices), cpus=begun.cpus + asked.cpus,
                memory_bytes=begun.memory_bytes + asked.memory_bytes,
            )  # fmt: skip
        return granted, begun

    def _our_ids(self, jobs: Sequence[SlurmJob]) -> frozenset[str]:
        return frozenset(job.id for job in jobs if self._ours(job) is not None)

    def _ours(self, job: SlurmJob) -> tuple[str, JobId, Epoch] | None:
        named = render.read_comment(job.comment)
        return named if named is not None and named[0] == self.settings.tag else None

    def _find_partition(self, within_s: float) -> Partition | None:
        found = parse.partitions_of(commands.ask(render.PARTITIONS, within_s=within_s))
        wanted = self.settings.partition
        return next((one for one in found if (one.name == wanted if wanted else one.default)), None)


def _queue() -> tuple[SlurmJob, ...]:
    """Slurm's queue.

    Raises:
        TryLater: Slurm does not answer.
        Unreadable: it says what we do not understand.
    """
    mark = f"|{secrets.token_hex(8)}|"
    return parse.jobs_of(commands.ask(render.jobs(mark)), mark)
