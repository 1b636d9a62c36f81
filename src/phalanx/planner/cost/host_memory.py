"""What the host of a node does under offload: copies over PCIe, and the update of the optimizer on the CPU.

Legend: n parameters that one rank updates, r ranks of a node, B bytes/s of the host's memory, P bytes/s of PCIe for each device.
    copies       bytes / min(share of P, B / r)
    room         what the ranks of a node keep there must be less than its memory; buffers take up to half more, so that above 1 / 1.5 it is tight
    CPU update   r n 30 / (share of B): it reads gradient, moments and master copy (16), and writes all but the gradient and a 16-bit copy (14)
Sources: J. Ren et al., "ZeRO-Offload", 2021, sections 4 and 5.1; S. Rajbhandari et al., "ZeRO-Infinity", 2021, section 3.
"""

from __future__ import annotations

from typing import Final

from phalanx.core.work.layouts.layout import Layout
from phalanx.planner.cost.machine import Machine
from phalanx.planner.cost.training_task import TrainingTask, updated_parameters

COPY_SHARE: Final = 0.5
"""Share of the PCIe bandwidth that copies to and from pinned host memory reach, while two devices share a switch. Source: our estimate, 2026-11."""
UPDATE_BYTES: Final = 30.0
"""Moved in the host's memory to update one parameter."""
UPDATE_SHARE: Final = 0.45
"""Share of the host's memory bandwidth that the update reaches with all cores. Source: J. Ren et al., "ZeRO-Offload", 2021, table of Adam's
latency (0.22 s for a billion parameters, 2.6 s for ten, two Xeon 8168 of 128 GB/s each), from memory, not re-read."""
THREAD_PARAMETERS_PER_S: Final = 47e6
"""Parameters that one thread updates in a second. Source: gist.github.com/chenyaofo/d4cd6a20ab4b95cb3a49491747e2139a, DeepSpeed 0.14.2, Llama 7B on
8 A800: offload of the optimizer adds 17 to 20 s to a step in which each of 8 ranks updates 842M; torchrun starts ranks with one thread."""


BUFFERS: Final = 1.5
"""Most memory of a host over what is stored there. Source: DeepSpeed docs/code-docs/source/memory.rst, additional_buffer_factor."""


def ranks_of_node(layout: Layout, machine: Machine) -> int:
    """Return the ranks that share one host."""
    return min(machine.gpus_per_node, layout.ranks)


def exceeds_host(rank_bytes: float, layout: Layout, machine: Machine) -> bool:
    """Return whether the ranks of a node store more in its memory than it has. A host of unknown size has room."""
    return _over_host(rank_bytes, layout, machine, 1.0)


def is_tight_on_host(rank_bytes: float, layout: Layout, machine: Machine) -> bool:
    """Return whether they have room, but not with the most buffers."""
    return not exceeds_host(rank_bytes, layout, machine) and _over_host(rank_bytes, layout, machine, BUFFERS)


def _over_host(rank_bytes: float, layout: Layout, machine: Machine, factor: float) -> bool:
    if machine.host_memory_bytes is None:
        return False
    return rank_bytes * ranks_of_node(layout, machine) * factor > machine.host_memory_bytes


def copy_s(size_bytes: float, layout: Layout, machine: Machine) -> float:
    """Return the time in which every rank of a node copies so many bytes to or from the host."""
    shared = machine.host_bytes_per_s / ranks_of_node(layout, machine)
    return size_bytes / min(machine.gpu.pcie_bytes_per_s * COPY_SHARE, shared)


def one_thread_s(task: TrainingTask, layout: Layout) -> float:
    """Return the time in which each rank updates its parameters with one thread."""
    return updated_parameters(task, layout) / THREAD_PARAMETERS_PER_S


def cpu_update_s(parameters: float, layout: Layout, machine: Machine) -> float:
    """Return the time in which the CPUs of a node update so many parameters of every rank, with all their cores."""
    moved = ranks_of_node(layout, machine) * parameters * UPDATE_BYTES
    return moved / (machine.host_bytes_per_s * UPDATE_SHARE)
