"""Virtual devices: slots on a machine without GPUs, whose "utilisation" is the CPU use of their ranks; marked as virtual.

A process that a rank left behind by a double fork counts for the slot of that rank, also after the rank has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from phalanx.node.probes.devices import DeviceFacts, DeviceReading
from phalanx.node.processes.proctable import (
    TICKS_PER_S,
    ProcessIdentity,
    ProcessRow,
    descendants,
    process_environment,
    read_below,
)

COUNTER = "rank_cpu"
_LOCAL_RANK = b"LOCAL_RANK"
_RANK_DIGITS_MAX = 6  # a process writes its environment as it likes


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTenant:
    """One of the jobs on a slot.

    Attributes:
        keeper: the process below which all processes of the job on this node are.
        ranks: pids of its ranks on this node that run, by local rank.
        local_ranks: those to which the slot belongs; None for all.
    """

    keeper: int
    ranks: Mapping[int, int]
    local_ranks: frozenset[int] | None = None


class VirtualProbe:
    """The slots of one virtual node; a DeviceProbe. Call `bind` when the tenants of a slot change.

    Args:
        memory_bytes: of each slot.
        model: of each slot; "virtual h100-80gb" if it stands in for that GPU.
    """

    def __init__(
        self,
        node_key: str,
        slots: int,
        memory_bytes: int,
        *,
        model: str = "virtual",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._facts = tuple(
            DeviceFacts(
                index=index,
                uuid=f"VIRTUAL-{node_key}-{index}",
                model=model,
                memory_bytes=memory_bytes,
                pci_bus="",
                virtual=True,
            )
            for index in range(slots)
        )
        self._clock = clock
        self._bound: dict[int, tuple[SlotTenant, ...]] = {}
        self._ticks: dict[int, tuple[float, int]] = {}  # by slot: when, and how much CPU its processes had used by then
        self._left_by: dict[ProcessIdentity, int | None] = {}  # local rank whose process it is; None if unknown

    def bind(self, slot: int, tenants: Sequence[SlotTenant]) -> None:
        """Assign the processes of these tenants to the slot."""
        keepers = [tenant.keeper for tenant in self._bound.get(slot, ())]
        self._bound[slot] = tuple(tenants)
        if keepers != [tenant.keeper for tenant in tenants]:
            self._ticks.pop(slot, None)

    def unbind(self, slot: int) -> None:
        """Clear the slot."""
        self._bound.pop(slot, None)
        self._ticks.pop(slot, None)

    def devices(self) -> tuple[DeviceFacts, ...]:
        """The slots."""
        return self._facts

    def sample(self) -> tuple[DeviceReading, ...]:
        """CPU use since the previous sample as a share of one core (more counts as 1), and resident memory; idle slots show 0."""
        table = read_below({tenant.keeper for tenants in self._bound.values() for tenant in tenants})
        now = self._clock()
        processes = self._processes(table)
        samples = []
        for facts in self._facts:
            rows = [table[pid] for pid in processes.get(facts.index, ())]
            samples.append(
                DeviceReading(
                    index=facts.index,
                    uuid=facts.uuid,
                    utilization=self._utilization(facts.index, now, sum(row.cpu_ticks for row in rows)),
                    counter=COUNTER,
                    memory_used_bytes=sum(row.resident_bytes for row in rows),
                    memory_total_bytes=facts.memory_bytes,
                    virtual=True,
                    processes=sum(not row.dead for row in rows),
                )
            )
        return tuple(samples)

    def _processes(self, table: Mapping[int, ProcessRow]) -> dict[int, set[int]]:
        """The pids of each slot."""
        by_rank: dict[int, dict[int | None, set[int]]] = {}  # by keeper
        known: dict[ProcessIdentity, int | None] = {}
        found: dict[int, set[int]] = {}
        for slot, tenants in self._bound.items():
            pids = found.setdefault(slot, set())
            for tenant in tenants:
                if tenant.keeper not in by_rank:
                    by_rank[tenant.keeper] = self._by_rank(tenant, table, known)
                for rank, its in by_rank[tenant.keeper].items():
                    if rank is None or tenant.local_ranks is None or rank in tenant.local_ranks:
                        pids |= its
        self._left_by = known
        return found

    def _by_rank(
        self, tenant: SlotTenant, table: Mapping[int, ProcessRow], known: dict[ProcessIdentity, int | None]
    ) -> dict[int | None, set[int]]:
        """The processes below a keeper by the local rank that started them, which is also noted in `known`."""
        rank_by_pid = {pid: rank for rank, pid in tenant.ranks.items()}
        found: dict[int | None, set[int]] = {}
        for row in [row for row in table.values() if row.parent == tenant.keeper]:
            rank = rank_by_pid[row.pid] if row.pid in rank_by_pid else self._rank_that_left(row)
            pids = {row.pid} | descendants(table, [row.pid])
            found.setdefault(rank, set()).update(pids)
            known.update(dict.fromkeys((table[pid].identity for pid in pids), rank))
        return found

    def _rank_that_left(self, row: ProcessRow) -> int | None:
        """The local rank of a process whose parent has ended: as seen while that lived, else as its environment says."""
        if row.identity in self._left_by:
            return self._left_by[row.identity]
        stated = process_environment(row.pid).get(_LOCAL_RANK, b"")
        return int(stated) if stated.isdigit() and len(stated) <= _RANK_DIGITS_MAX else None

    def close(self) -> None:
        """Do nothing: it holds no resources."""

    def _utilization(self, slot: int, now: float, ticks: int) -> float:
        before, ticks_before = self._ticks.get(slot, (now, ticks))
        self._ticks[slot] = (now, ticks)
        if now <= before:
            return 0.0
        # The ticks of a child that was never waited for disappear: the sum may fall, but use is never negative.
        return min(1.0, max(0, ticks - ticks_before) / TICKS_PER_S / (now - before))
