"""Chooses nodes for data that is copied before its job holds GPUs, and limits for how many waiting jobs a node gets data at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import Final

from phalanx.core.fleet.node import HeldDataset
from phalanx.core.ids import JobId, NodeId
from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.board_records import JobEntry
from phalanx.core.scheduling.fleet_index import FleetIndex
from phalanx.core.scheduling.needs import Need
from phalanx.core.scheduling.node_bitsets import bitset_of, lowest_member
from phalanx.core.work.job import Job

SHORT_COPY_S: Final = 30.0  # a copy known to be shorter is made while the job holds its GPUs
EXAMINED_MAX: Final = 32  # jobs in one cycle
_HOLDERS_MAX: Final = 16  # nodes whose copies say how large a dataset is and how fast it arrives
_LATE_S: Final = 1e12  # the end of a run that has no time limit


@dataclass(frozen=True, slots=True)
class StagingTarget:
    """Nodes to which a job's data is copied. `nodes` is empty if all of them are taken: the job may then only join a copy under way."""

    job_id: JobId
    nodes: tuple[NodeId, ...]


class StagingTargets:
    """The waiting jobs whose data may be copied ahead, and the nodes of those for which that was done.

    The data of a job is copied ahead once: where it lands later, its nodes copy what they lack as part of the start. A node is a target for
    waiting jobs with together at most as many devices as it has, so that a long queue does not fill the disks.
    """

    __slots__ = ("_staged", "_unstaged")

    def __init__(self) -> None:
        self._unstaged: dict[JobId, None] = {}
        self._staged: dict[JobId, tuple[NodeId, ...]] = {}

    def clear(self) -> None:
        """The board is new."""
        self._unstaged.clear()
        self._staged.clear()

    def drop(self, job_id: JobId) -> None:
        """The job runs or has ended."""
        self._unstaged.pop(job_id, None)
        self._staged.pop(job_id, None)

    def update(self, job: Job) -> None:
        """The job waits. Only its first attempt counts: a job that ran has its data on some node, or wants its place back."""
        self.drop(job.id)
        if not _is_staged_ahead(job):
            return
        if job.staged_on:
            self._staged[job.id] = job.staged_on
        else:
            self._unstaged[job.id] = None

    def choose(self, board: Board, fleet: FleetIndex, entries: Mapping[JobId, JobEntry]) -> list[StagingTarget]:
        """Choose targets for the jobs that may start but lack their data; no node for two of them beyond its devices."""
        if not self._unstaged:
            return []
        waiting = [
            (entry, job_id)
            for job_id in self._unstaged
            if (entry := entries.get(job_id)) is not None
            and entry.started_s < 0.0
            and not (entry.overdue or entry.lost_nodes)
        ]
        waiting.sort(key=lambda one: (-one[0].job_class.rank, one[0].seq))
        promised = self._promised_devices(fleet, entries)
        found: list[StagingTarget] = []
        for entry, job_id in waiting[:EXAMINED_MAX]:
            if _copy_time_s(board, fleet, entry) < SHORT_COPY_S:
                continue
            place = _nodes_for(board, entry, promised)
            if place is None:
                found.append(StagingTarget(job_id, ()))
                continue
            need, numbers = place
            nodes = [fleet.nodes[number] for number in numbers]
            copies = _nodes_with_data(board, entry)
            if all(copies >> number & 1 for number in numbers) or any(node.per_attempt for node in nodes):
                continue
            for number in numbers:
                promised[number] = promised.get(number, 0) + need.node_devices
            found.append(StagingTarget(job_id, tuple(sorted({node.id for node in nodes}))))
        return found

    def _promised_devices(self, fleet: FleetIndex, entries: Mapping[JobId, JobEntry]) -> dict[int, int]:
        """Devices of each node that jobs will use whose data is there, or on its way there."""
        promised: dict[int, int] = {}
        for job_id, names in self._staged.items():
            entry = entries.get(job_id)
            devices = 1 if entry is None else max(1, entry.job_class.needs[0].node_devices)
            for name in names:
                for number in fleet.numbers_of_node.get(name, ()):
                    promised[number] = promised.get(number, 0) + devices
        return promised


def _is_staged_ahead(job: Job) -> bool:
    role = job.spec.role
    return job.spec.stages_data and role.milli > 0 and not role.others and job.epoch == 0 and job.replica is None


def _nodes_with_data(board: Board, entry: JobEntry) -> int:
    """The nodes that have all of its data."""
    found = (1 << len(board.pool_of_node)) - 1
    for key in entry.data:
        found &= board.data_nodes.get(key, 0)
    return found


def _copy_time_s(board: Board, fleet: FleetIndex, entry: JobEntry) -> float:
    """How long a copy of all its data takes by the copies that exist; infinite if none says."""
    total_s = 0.0
    for key in entry.data:
        holders = board.data_nodes.get(key, 0)
        copies: list[HeldDataset] = []
        while holders and len(copies) < _HOLDERS_MAX:
            number = (holders & -holders).bit_length() - 1
            holders &= holders - 1
            copies += [one for one in fleet.nodes[number].datasets if one.key == key]
        rates = [one.bytes_per_s for one in copies if one.bytes_per_s > 0]
        if not rates:
            return float("inf")
        total_s += max(one.size_bytes for one in copies) / median(rates)
    return total_s


def _nodes_for(board: Board, entry: JobEntry, promised: Mapping[int, int]) -> tuple[Need, list[int]] | None:
    """Where the job fits now, else where it will most likely fit first; None if other jobs' data has all of these nodes."""
    full = bitset_of(
        number
        for number, devices in promised.items()
        if devices + entry.job_class.needs[0].node_devices > board.devices_on_node(number)
    )
    found = board.find(entry, full)
    if found is not None:
        need, places = found
        return need, [number for number, _ in places]
    for need in entry.job_class.needs:
        if need.nodes > 1 and board.tree is not None:
            continue  # a gang waits for one domain of the network; which one is known once it is free
        numbers = _first_free(board, entry, need, full)
        if numbers:
            return need, numbers
    return None


def _first_free(board: Board, entry: JobEntry, need: Need, full: int) -> list[int]:
    """The nodes of one kind that have the data or whose devices are free first, as many as the need has parts; empty if too few exist."""
    opened = ((1 << len(board.pool_of_node)) - 1) & ~(full | entry.job_class.excluded | need.excluded)
    avoided = entry.avoided_nodes | board.last_choice_nodes
    copies = _nodes_with_data(board, entry)
    for kind in need.kinds:
        # Nothing is copied if enough nodes have the data, whichever is free first: most jobs of a long queue end here, in each cycle.
        beside = list(islice(_usable(board, need, kind, opened & copies & ~avoided), need.parts))
        if len(beside) == need.parts:
            return beside
        usable = list(_usable(board, need, kind, opened))
        if len(usable) >= need.parts:
            ranked = sorted(
                usable,
                key=lambda number: (
                    avoided >> number & 1,
                    not copies >> number & 1,
                    *_free_at(board, number, need.node_devices),
                    number,
                ),
            )
            return sorted(ranked[: need.parts])
    return []


def _usable(board: Board, need: Need, kind: int, nodes: int) -> Iterator[int]:
    """Those of these nodes that are of the kind and large enough, ascending."""
    while nodes:
        number = lowest_member(nodes)
        nodes &= nodes - 1
        if (
            board.pool_of_node[number] == kind
            and number not in board.closed_nodes
            and board.devices_on_node(number) >= need.node_devices
        ):
            yield number


def _free_at(board: Board, number: int, devices: int) -> tuple[float, float]:
    """When so many devices of the node are free, by the time limits of its jobs, and since when the job runs that ends last for that."""
    held = [(entry.devices_on(number) or 1, entry) for entry in board.jobs_on_node[number]]
    free = board.devices_on_node(number) - sum(count for count, _ in held)
    ends = sorted(
        (entry.started_s + entry.size_s if entry.size_s >= 0.0 else _LATE_S, entry.started_s, entry.seq, count)
        for count, entry in held
    )
    for end_s, started_s, _, count in ends:
        if free >= devices:
            break
        free += count
        found = (end_s, started_s)
        if free >= devices:
            return found
    return (0.0, 0.0)
