"""Resident Slurm jobs: nodes of a node pool, each a Slurm job with a supervisor that stays between attempts. The provider of that pool.

The pool (`core.fleet.node_pool`) decides how many there are: it orders them for waiting jobs, and releases those that idle. This module
submits and cancels the Slurm jobs, and reports those that end, and those whose time limit in Slurm is near.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from phalanx.core.errors import BadRequest, PhalanxError, TryLater
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node_pool import ChargedMachine, NodeTemplate
from phalanx.core.ids import NodeId
from phalanx.core.units import format_duration
from phalanx.engines.resident_nodes import EngineProvider, ReportedNode
from phalanx.engines.resident_option import GPUS_MAX
from phalanx.engines.slurm import commands, parse, render
from phalanx.engines.slurm.options import ENGINE_NAME
from phalanx.engines.slurm.parse import ResidentRow, SlurmNode
from phalanx.engines.slurm.sbatch_request import SlurmSettings, is_unreachable
from phalanx.ports.provider import CallUnanswered, EndedOrder, LeavingNode, LostNode, NodeOrder, PoolTerms
from phalanx.wire.resident import RESIDENT_VARIABLE, ResidentAssignment, encode_resident

COMMAND: Final = ("-P", "-m", "phalanx.app.resident_supervisor")
POLL_S: Final = 1.0  # one squeue of this account's jobs; only while there are resident jobs
IDLE_POLL_S: Final = 30.0  # for jobs without an order, such as those of a submit that was not answered
DRAIN_BEFORE_S: Final = 120.0  # before Slurm's time limit, at most a quarter of it: jobs save, and go on elsewhere
MISSING_S: Final = 15.0  # a submitted job that squeue does not list for so long is gone
STOP_WAIT_S: Final = 2.0  # in one call for a job to end; the head calls again
HEAD_GONE_S: Final = 3600.0
_UNCERTAIN: Final = frozenset({"NODE_FAIL", "BOOT_FAIL", "REVOKED"})  # ended without the node's word: the lease decides
_STRAY: Final = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED")  # a job that is ending needs no scancel
_log = logging.getLogger("phalanx.engines.slurm")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentShare:
    """What a resident job asks for: a share of a typical node in proportion to its GPUs, all of it without GPUs."""

    gpus: int
    kind: str
    cpus: int
    memory_bytes: int


@dataclass(slots=True)
class ResidentJob(ReportedNode):
    """An order and its Slurm job. `since_s`: monotonic seconds of the submit; `seen`: squeue listed it."""

    order: NodeOrder
    comment: str
    since_s: float
    seen: bool = False


@dataclass(slots=True, kw_only=True)
class ResidentJobs(EngineProvider):
    """The provider of one head.

    Args:
        settings: how this head uses Slurm; its `supervisor` begins with the Python of the nodes.
        token_of: makes a node's token.
        memory_of: returns the memory of a device of a GRES type, in bytes.
        time: Slurm's time limit for each job as Slurm writes it; "" for the partition's.
    """

    settings: SlurmSettings
    token_of: Callable[[NodeId], str]
    memory_of: Callable[[str], int] = lambda _: 0
    time: str = ""
    head_gone_s: float = HEAD_GONE_S
    _held: dict[NodeId, ResidentJob] = field(default_factory=dict)
    _rows: Mapping[str, ResidentRow] | None = None
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _wake: threading.Event = field(default_factory=threading.Event)
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def offer(self, terms: PoolTerms) -> NodeTemplate:
        """Return what a Slurm job with so many GPUs has, by the nodes of the partition.

        Raises:
            BadRequest: the template is no number of GPUs, no node has so many, or the pool has zones or settings.
            TryLater: Slurm does not answer.
        """
        if terms.zones or terms.settings:
            raise BadRequest("a pool in Slurm has no zones and no settings")
        text = terms.template.strip()
        if not text.isdecimal() or int(text) > GPUS_MAX:
            raise BadRequest(f"{text[:40]!r} is not a number of GPUs from 0 to {GPUS_MAX}", hint="8 is a job of 8 GPUs")
        share = node_share(self._nodes(), int(text))
        device = Device(index=0, uuid="", model=share.kind or "gpu", memory_bytes=self.memory_of(share.kind))
        return NodeTemplate(
            text=text,
            devices=tuple(replace(device, index=index) for index in range(share.gpus)),
            cpus=share.cpus,
            memory_bytes=share.memory_bytes,
        )

    def open(self, orders: Sequence[NodeOrder]) -> None:
        """Follow the Slurm jobs of these orders; all others of this head are cancelled."""
        now_s = time.monotonic()
        with self._guard:
            for order in orders:
                self._held[order.node_id] = ResidentJob(order, self._comment(order), now_s)
        self._thread = threading.Thread(target=self._run, name="slurm-resident", daemon=True)
        self._thread.start()

    def start(self, order: NodeOrder) -> None:
        """Submit the Slurm job of an order, unless it is there.

        Raises:
            CallUnanswered: Slurm did not answer.
            PhalanxError: Slurm refuses the job.
        """
        known = self._held.get(order.node_id)
        if known is not None and known.order.token != order.token:
            self.stop(known.order)
        comment = self._comment(order)
        with self._guard:  # before the submit: a job that is listed without its order is cancelled
            self._held[order.node_id] = held = ResidentJob(order, comment, time.monotonic())
        try:
            if not any(row.comment == comment and not row.has_ended for row in self._list()):
                self._submit(order, comment)
        except TryLater as error:
            raise CallUnanswered(error.message) from error
        except BadRequest:
            with self._guard:
                self._held.pop(order.node_id, None)
            raise
        held.since_s = time.monotonic()
        self._wake.set()

    def stop(self, order: NodeOrder) -> Sequence[ChargedMachine]:
        """Cancel the Slurm job of an order, and wait until it has ended.

        Raises:
            OSError: it still ends.
            TryLater: Slurm does not answer.
        """
        comment, until_s = self._comment(order), time.monotonic() + STOP_WAIT_S
        cancelled: set[str] = set()
        while left := [row for row in self._list() if row.comment == comment and not row.has_ended]:
            if new := [row.id for row in left if row.id not in cancelled]:
                commands.output_of(render.cancel_command(new))
                cancelled.update(new)
            if time.monotonic() > until_s:
                raise OSError(f"Slurm job {left[0].id} has not ended yet")
            self._ended.wait(0.2)
        with self._guard:
            held = self._held.get(order.node_id)
            if held is not None and held.order.token == order.token:
                del self._held[order.node_id]
        return ()

    def observe(self) -> Sequence[LostNode | LeavingNode]:
        """Return the nodes whose Slurm jobs ended, or end soon."""
        with self._guard:
            rows, held_now = self._rows, list(self._held.values())
        if rows is None:
            return ()
        found: list[LostNode | LeavingNode] = []
        now_s = time.monotonic()
        for held in held_now:
            row = rows.get(held.comment)
            held.seen = held.seen or row is not None
            event = judge(held, row, now_s)
            if event is not None and held.is_news(event):
                found.append(event)
        return found

    def close(self, *, keep_nodes: bool) -> Sequence[EndedOrder]:
        """Stop following; unless `keep_nodes`, cancel all resident jobs."""
        self._ended.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=commands.ANSWER_S)
        if not keep_nodes:
            try:
                left = [row.id for row in self._list() if self._is_ours(row) and not row.has_ended]
                if left:
                    commands.output_of(render.cancel_command(left))
            except (PhalanxError, OSError) as error:  # the next head finds them by their comments
                _log.warning("Resident Slurm jobs could not be cancelled: %s", error)
        return ()

    # ---- Slurm ----------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                rows = self._list()
            except (PhalanxError, OSError) as error:
                _log.warning("Slurm does not answer; its resident jobs run on: %s", error)
                with self._guard:
                    self._rows = None  # what is known is old: nothing is concluded from it
            else:
                self._note(rows)
            self._wake.wait(POLL_S if self._held else IDLE_POLL_S)
            self._wake.clear()

    def _note(self, rows: Sequence[ResidentRow]) -> None:
        """Keep what squeue listed, and cancel the jobs of orders that this head does not know, as after the restore of an older backup."""
        with self._guard:
            self._rows = {row.comment: row for row in sorted(rows, key=lambda row: not row.has_ended)}
            held = {one.comment for one in self._held.values()}
        strays = [row.id for row in rows if self._is_ours(row) and row.comment not in held and row.state in _STRAY]
        if strays:
            commands.run(render.cancel_command(strays))

    def _submit(self, order: NodeOrder, comment: str) -> None:
        share = node_share(self._nodes(), int(order.template))
        argv, script = render.resident_command(
            render.ResidentRequest(
                name=order.node_id,
                comment=comment,
                gpus=share.gpus,
                kind=share.kind,
                cpus=share.cpus,
                memory_bytes=share.memory_bytes,
                time=self.time,
                command=(self.settings.supervisor[0], *COMMAND),
                partition=self.settings.partition,
                account=self.settings.account,
                qos=self.settings.qos,
            )
        )
        text = encode_resident(
            ResidentAssignment(
                node_id=order.node_id,
                token=self.token_of(order.node_id),
                engine=ENGINE_NAME,
                head_url=self.settings.head_url,
                ca_pem=self.settings.ca_pem,
                devices=share.gpus,
                head_gone_s=self.head_gone_s,
                cpus=share.cpus,
                memory_bytes=share.memory_bytes,
                signals_reach_ranks=True,
            )
        )
        done = commands.run(argv, given=script, more={RESIDENT_VARIABLE: text})
        if done.code != 0:
            if is_unreachable(done.why):
                raise TryLater(f"Slurm's controller does not answer: {done.why}")
            raise BadRequest(f"Slurm refused the resident job of {order.node_id}: {done.why}")
        _log.info("node %s is Slurm job %s", order.node_id, done.stdout.strip().partition(";")[0])

    def _nodes(self) -> Sequence[SlurmNode]:
        """Return the nodes of the partition."""
        nodes = parse.parse_nodes(commands.output_of(render.SHOW_NODES))
        wanted = self.settings.partition
        if not wanted:
            partitions = parse.parse_partitions(commands.output_of(render.SHOW_PARTITIONS))
            wanted = next((one.name for one in partitions if one.default), "")
        return [node for node in nodes if not wanted or wanted in node.partitions]

    def _list(self) -> Sequence[ResidentRow]:
        mark = f"|{secrets.token_hex(8)}|"
        text = commands.output_of(render.list_resident_command(mark, os.geteuid()))
        return [row for row in parse.parse_resident_rows(text, mark) if self._is_ours(row)]

    def _is_ours(self, row: ResidentRow) -> bool:
        return row.comment.startswith(render.resident_prefix(self.settings.tag))

    def _comment(self, order: NodeOrder) -> str:
        return render.resident_comment(self.settings.tag, order.node_id, order.token)


def judge(held: ResidentJob, row: ResidentRow | None, now_s: float) -> LostNode | LeavingNode | None:
    """Return what the state of its Slurm job means for a node: it is lost, it leaves, or None for neither.

    Lost means that no process of it is left, which Slurm knows of a job that ended on a node that answers.
    """
    order = held.order

    def leaves(why: str) -> LeavingNode:
        return LeavingNode(node_id=order.node_id, token=order.token, why=why)

    if row is None:
        gone = held.seen or now_s - held.since_s >= MISSING_S
        return leaves("its Slurm job is no longer in Slurm's queue") if gone else None
    if row.has_ended:
        why = f"Slurm job {row.id} ended: {row.state.lower()}"
        return leaves(why) if row.state in _UNCERTAIN else LostNode(node_id=order.node_id, token=order.token, why=why)
    if row.state == "COMPLETING":
        return leaves(f"Slurm ends job {row.id}")
    left_s = row.left_s if row.state == "RUNNING" and row.left_s is not None else math.inf
    if left_s <= min(DRAIN_BEFORE_S, (row.limit_s or math.inf) / 4):
        return leaves(f"the time limit of Slurm job {row.id} ends in {format_duration(left_s)}")
    return None


def node_share(nodes: Sequence[SlurmNode], gpus: int) -> ResidentShare:
    """Return what a resident job with so many GPUs asks for, by the most frequent kind of node that can have it.

    Raises:
        BadRequest: no node has so many GPUs.
    """
    fit = [node for node in nodes if sum(kind.count for kind in node.gpus) >= gpus]
    if not fit:
        most = max((sum(kind.count for kind in node.gpus) for node in nodes), default=0)
        raise BadRequest(f"no node of Slurm's partition has {gpus} GPUs; the largest has {most}")
    shapes = [(node.gpus, node.cpus, node.memory_bytes) for node in fit]
    kinds, cpus, memory_bytes = max(shapes, key=lambda shape: (shapes.count(shape), shape[1]))
    total = sum(kind.count for kind in kinds)
    part, whole = (gpus, total) if gpus else (1, 1)
    kind = next((one.kind for one in kinds if one.count >= gpus), "") if gpus else ""
    return ResidentShare(
        gpus=gpus, kind=kind, cpus=max(1, cpus * part // whole), memory_bytes=memory_bytes * part // whole
    )
