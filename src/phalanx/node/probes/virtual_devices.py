"""Virtual devices: slots on a machine without GPUs, whose "utilisation" is the CPU use of their ranks; marked as virtual."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from phalanx.node.probes.devices import DeviceFacts, DeviceReading
from phalanx.node.processes.proctable import (
    TICKS_PER_S,
    ProcessIdentity,
    descendants,
    identity,
    read_table,
)

COUNTER = "rank_cpu"


class VirtualProbe:
    """The slots of one virtual node; a DeviceProbe. Call `bind` when a slot's rank starts.

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
        self._bound: dict[int, tuple[ProcessIdentity, ...]] = {}
        self._ticks: dict[int, tuple[float, int]] = {}  # by slot: when, and how much CPU its ranks had used by then

    def bind(self, slot: int, pids: Iterable[int]) -> None:
        """Assign these ranks, with their descendants, to the slot."""
        found = (identity(pid) for pid in pids)
        self._bound[slot] = tuple(process for process in found if process is not None)
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
        table = read_table()
        now = self._clock()
        samples = []
        for facts in self._facts:
            roots = {
                process.pid
                for process in self._bound.get(facts.index, ())
                if process.pid in table and table[process.pid].identity == process
            }
            rows = [table[pid] for pid in roots | descendants(table, roots)]
            samples.append(
                DeviceReading(
                    index=facts.index,
                    uuid=facts.uuid,
                    utilization=self._utilization(facts.index, now, sum(row.cpu_ticks for row in rows)),
                    counter=COUNTER,
                    memory_used_bytes=sum(row.resident_bytes for row in rows),
                    memory_total_bytes=facts.memory_bytes,
                    virtual=True,
                    processes=len(rows),
                )
            )
        return tuple(samples)

    def close(self) -> None:
        """Do nothing: it holds no resources."""

    def _utilization(self, slot: int, now: float, ticks: int) -> float:
        before, ticks_before = self._ticks.get(slot, (now, ticks))
        self._ticks[slot] = (now, ticks)
        if now <= before:
            return 0.0
        # The ticks of a child that was never waited for disappear: the sum may fall, but use is never negative.
        return min(1.0, max(0, ticks - ticks_before) / TICKS_PER_S / (now - before))
