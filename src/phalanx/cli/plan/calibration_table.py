"""A calibration as a table: measured beside expected. Fact tables give the expected values of parts, the measured parts those of steps.

Pure, from a profile to rows and lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from phalanx.cli.cells import count
from phalanx.cli.tables import Column, table
from phalanx.cli.terminal import Terminal, strip_control
from phalanx.core.errors import BadRequest
from phalanx.planner.calibration.profile import (
    SLOW_SHARE,
    Profile,
    RunMeasurement,
    SlowPart,
    measured_rates,
    slow_parts,
)

if TYPE_CHECKING:
    from phalanx.planner.facts.gpus import GpuEntry

_SLOW_SHOWN: Final = 10
_FLOPS, _BYTES = "FLOP/s", "B/s"
_COLUMNS: Final = (
    Column(title="what", min_width=20),
    Column(title="measured", right=True),
    Column(title="expected", right=True, drop_order=1),
    Column(title="ratio", right=True, drop_order=1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRow:
    """One measurement. `unit` is FLOP/s, B/s or s; `expected` is None if unknown."""

    what: str
    measured: float
    unit: str
    expected: float | None = None

    @property
    def ratio(self) -> float | None:
        """Measured over expected."""
        return self.measured / self.expected if self.expected else None


def calibration_rows(profile: Profile) -> list[CalibrationRow]:
    """Return all measurements of the profile, by accelerator."""
    gpus = sorted({node.gpu for node in profile.nodes})
    return [row for gpu in gpus for row in _of_gpu(profile, gpu, f"{gpu}: " if len(gpus) > 1 else "")]


def profile_lines(profile: Profile, stale: Sequence[str], screen: Terminal) -> list[str]:
    """Return the table and its notes as lines."""
    rows = [
        (
            row.what,
            format_amount(row.measured, row.unit),
            "" if row.expected is None else format_amount(row.expected, row.unit),
            "" if row.ratio is None else f"{100 * row.ratio:.0f}%",
        )
        for row in calibration_rows(profile)
    ]
    quick = ", quick" if profile.quick else ""
    lines = [f"{count(len(profile.nodes), 'node')} measured at {profile.at}{quick}", *table(_COLUMNS, rows, screen)]
    slow = slow_parts(profile)
    lines += [screen.paint(strip_control(format_slow_part(part)), "yellow") for part in slow[:_SLOW_SHOWN]]
    if len(slow) > _SLOW_SHOWN:
        lines.append(f"and {len(slow) - _SLOW_SHOWN} more slow parts; see --json")
    if not slow and len(profile.nodes) > 1:
        lines.append(f"no node and no link is more than {100 * SLOW_SHARE:.0f} % below the median")
    if slow and profile.quick:
        lines.append("a quick measurement can be disturbed by other work; calibrate without --quick to confirm")
    if any(node.virtual for node in profile.nodes):
        lines.append("virtual nodes share this machine's cores; the values are valid only while it is otherwise idle")
    lines += [strip_control(f"calibrate again: {reason}") for reason in stale]
    return lines


def format_slow_part(slow: SlowPart) -> str:
    """Format a slow part: `slow: n3, matmul bf16: 312 TFLOP/s, 21 % below the median`."""
    unit = _FLOPS if slow.what.startswith("matmul") else _BYTES
    return (
        f"slow: {slow.part}, {slow.what}: {format_amount(slow.value, unit)}, {100 * slow.share:.0f} % below the median"
    )


def format_amount(value: float, unit: str) -> str:
    """Format three digits and a decimal prefix: `312 TFLOP/s`, `1.25 GB/s`, `24.1 us`."""
    if value == 0.0:
        return f"0 {unit}"
    for prefix, size in (
        ("P", 1e15),
        ("T", 1e12),
        ("G", 1e9),
        ("M", 1e6),
        ("k", 1e3),
        ("", 1.0),
        ("m", 1e-3),
        ("u", 1e-6),
    ):
        if value >= size * 0.9995:
            scaled = value / size
            digits = 0 if scaled >= 99.95 else 1 if scaled >= 9.995 else 2
            return f"{scaled:.{digits}f} {prefix}{unit}"
    return f"{value:.1e} {unit}"


def _of_gpu(profile: Profile, gpu: str, mark: str) -> list[CalibrationRow]:
    """Return the rows of one accelerator: devices, links within and between nodes, and steps."""
    entry = _table_entry(gpu)
    found = measured_rates(profile, gpu=gpu)
    peak = {} if entry is None else entry.gpu.flops
    figures = [(f"matmul {precision}", flops, _FLOPS, peak.get(precision)) for precision, flops in found.flops.items()]
    link = network = memory = None
    if entry is not None:  # devices without links communicate over PCIe
        link = entry.gpu.link_bytes_per_s or entry.gpu.pcie_bytes_per_s
        network, memory = entry.network_bytes_per_s, entry.gpu.memory_bytes_per_s
    runs = [(run, _predicted_s(run, profile, entry)) for run in profile.runs if run.gpu == gpu]
    rows: list[tuple[str, float | None, str, float | None]] = [
        *figures,
        ("memory", found.memory_bytes_per_s, _BYTES, memory),
        ("all-reduce within nodes", found.within_bytes_per_s, _BYTES, link),
        ("all-to-all within nodes", found.all_to_all_within_bytes_per_s, _BYTES, link),
        ("latency within nodes", found.within_latency_s, "s", None),
        ("all-reduce between nodes", found.between_bytes_per_s, _BYTES, network),
        ("all-to-all between nodes", found.all_to_all_between_bytes_per_s, _BYTES, network),
        ("latency between nodes", found.between_latency_s, "s", None),
        ("storage write, per node", found.storage_bytes_per_s, _BYTES, _assumed_storage()),
        *(
            (f"step on {run.nodes}x{run.gpus_per_node}: {_layout_text(run)}", run.step_s, "s", predicted_step_s)
            for run, predicted_step_s in runs
        ),
    ]
    return [
        CalibrationRow(what=f"{mark}{what}", measured=value, unit=unit, expected=expected)
        for what, value, unit, expected in rows
        if value is not None
    ]


def _predicted_s(run: RunMeasurement, profile: Profile, entry: GpuEntry | None) -> float | None:
    """Return the step time predicted from the measured parts; None for an accelerator without table entry."""
    from phalanx.planner.calibration.slowdown import CALIBRATION_STACK, predict_step_s
    from phalanx.planner.cost.machine import Machine
    from phalanx.planner.facts.coefficient_table import find_stack, physics

    if entry is None:
        return None
    machine = Machine(
        gpu=entry.gpu, nodes=run.nodes, gpus_per_node=run.gpus_per_node, network_bytes_per_s=entry.network_bytes_per_s
    )
    return predict_step_s(run, profile, machine, physics(), find_stack(CALIBRATION_STACK))


def _assumed_storage() -> float:
    """Return the storage rate that plans assume without measurement."""
    from phalanx.planner.facts.machines import default_figure

    gb_per_s, _ = default_figure("storage_gb_per_s")
    return gb_per_s * 1e9


def _table_entry(gpu: str) -> GpuEntry | None:
    """Return the accelerator's table entry; None if the table lacks it."""
    from phalanx.planner.facts.gpus import find_gpu

    try:
        return find_gpu(gpu)
    except BadRequest:
        return None


def _layout_text(run: RunMeasurement) -> str:
    """Describe a layout: `2 tensor x 2 data parallel`."""
    degrees = {"tensor": run.layout.tensor, "pipeline": run.layout.pipeline, "data": run.layout.data}
    text = " x ".join(f"{degree} {kind}" for kind, degree in degrees.items() if degree > 1)
    return f"{text} parallel" if text else "one rank"
