"""Effect of the rank order: the same training, layout and hosts, with a topology-aware and a naive order of ranks.

    python -m benchmarks.rank_order [--rate 200] [--devices 2] [--runs 7] [--json]

Two hosts of the lab (network namespaces, docs/lab.md) are joined by links of `--rate` Mbit/s each way; inside a host ranks use
loopback. A small GPT trains under each layout twice, alternating in the same processes: in the order that Phalanx plans (tensor parallel
ranks on one host) and in the naive one. Ratios compare step times of the same round, so that both had the same load on the machine.
Without a lab it prints the reason and exits with 0.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.figures import (
    Figure,
    argument_parser,
    plain_figure,
    print_progress,
    print_report,
)
from benchmarks.rank_order_plan import planned_s
from phalanx.core.work.layouts.layout import (
    DEFAULT_AXIS_ORDER,
    Axis,
    Layout,
    layout_to_json,
)
from tests.lab.lab import ROOT, Lab
from tests.lab.needs import why_not

HOSTS = 2
SHAPE = {"width": 128, "layers": 4, "heads": 8, "sequence": 128, "vocabulary": 256}
"""A GPT of 0.85 million parameters, small enough for two cores; 2,048 tokens per step and data parallel rank (`cases`)."""

STEPS = 2
RUNS = 7
HANG_S = 300.0
"""Time-out for all rounds together."""

STREAM = str(ROOT / "tests" / "lab" / "stream.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderCase:
    """One layout in two orders.

    Attributes:
        seats_planned, seats_naive: the process of each rank; processes are numbered host by host.
        naive: the layout of a user who ignores the network.
        naive_seen: the naive layout for ranks that are numbered host by host, as input for the planner.
    """

    name: str
    planned: Layout
    naive: Layout
    naive_seen: Layout
    seats_planned: list[int]
    seats_naive: list[int]
    means: str

    def arms(self) -> list[dict[str, Any]]:
        """Return both variants, as input for the ranks."""
        return [
            {"name": f"{self.name}/planned", "layout": layout_to_json(self.planned), "seats": self.seats_planned},
            {"name": f"{self.name}/naive", "layout": layout_to_json(self.naive), "seats": self.seats_naive},
        ]


def cases(devices: int) -> list[OrderCase]:
    """Return all comparisons, for a number of ranks on each of the two hosts."""
    straight = list(range(HOSTS * devices))
    dealt = [host * devices + index for index in range(devices) for host in range(HOSTS)]
    copies = Layout(tensor=devices, replicate=HOSTS, micro_batch=4, micro_batches=4)
    scattered = replace(copies, order=_innermost(Axis.REPLICATE))
    stages = Layout(tensor=devices, pipeline=HOSTS, micro_batch=4, micro_batches=4)
    spread = replace(stages, order=_innermost(Axis.PIPELINE))
    return [
        OrderCase(
            name="tp_dp",
            planned=copies,
            naive=scattered,
            naive_seen=scattered,
            seats_planned=straight,
            seats_naive=straight,
            means="naive: data innermost",
        ),
        OrderCase(
            name="tp_pp",
            planned=stages,
            naive=spread,
            naive_seen=spread,
            seats_planned=straight,
            seats_naive=straight,
            means="naive: pipeline innermost",
        ),
        OrderCase(
            name="tp_dp_dealt",
            planned=copies,
            naive=copies,
            naive_seen=scattered,
            seats_planned=straight,
            seats_naive=dealt,
            means="naive: host file h0,h1,h0,h1, tensor innermost",
        ),
    ]


def traffic_bytes(layout: Layout, seats: list[int], devices: int) -> float:
    """Return the bytes that one host sends to the other per step, by formula.

    A ring all-reduce of n bytes over two ranks sends n from each. Tensor parallel: two all-reduces of the activations forward and two
    backward per layer (Shoeybi et al. 2019, arXiv:1909.08053, section 3); data parallel: one of the rank's gradients; pipeline: one
    activation forward, its gradient backward.
    """
    width, layers, vocabulary = SHAPE["width"], SHAPE["layers"], SHAPE["vocabulary"]
    activation = 4.0 * layout.micro_batch * SHAPE["sequence"] * width  # fp32
    gradients = 4.0 * (12 * width * width * layers / layout.tensor / layout.pipeline + 2 * vocabulary * width)
    each = {
        Axis.TENSOR: 2.0
        * (layout.tensor - 1)
        / layout.tensor
        * 4.0
        * activation
        * layers
        / layout.pipeline
        * layout.micro_batches,
        Axis.REPLICATE: 2.0 * (layout.replicate - 1) / layout.replicate * gradients,
        Axis.PIPELINE: activation * layout.micro_batches,
    }
    total = 0.0
    for axis, sent_bytes in each.items():
        for rank in range(layout.ranks):
            here = layout.coordinates(rank)[axis]
            beside = rank + ((here + 1) % layout.size(axis) - here) * layout.stride(axis)
            if seats[rank] // devices == 0 and seats[beside] // devices == 1:
                total += sent_bytes
    return total


def main() -> int:
    """Measure and print."""
    parser = argument_parser("rank order in a shaped network")
    parser.add_argument("--rate", type=float, default=200.0, help="of the links between hosts, each way, in Mbit/s")
    parser.add_argument("--devices", type=int, default=2, help="ranks per host, one of 2, 4 or 8")
    asked = parser.parse_args()
    if why_not():
        print(f"rank_order: skipped: {why_not()}")
        return 0
    if asked.devices not in (2, 4, 8):
        parser.error(f"{asked.devices} ranks per host do not divide {SHAPE['heads']} heads: give 2, 4 or 8")
    wanted = [case for case in cases(asked.devices) if not asked.only or case.name in asked.only.split(",")]
    if not wanted:
        parser.error(f"--only {asked.only}: known are {', '.join(case.name for case in cases(asked.devices))}")
    with Lab(size=HOSTS, gpus=asked.devices, rate_mbit=asked.rate) as lab:
        figures = [_bandwidth(lab, "between hosts", "h0", "h1"), _bandwidth(lab, "inside a host", "h0", "h0")]
        lines = train(lab, wanted, devices=asked.devices, rounds=asked.runs or RUNS)
    found = _found(lines)
    figures += [
        plain_figure(
            "flops of a rank", [found["flops"] / 1e9], "GFLOP/s", note="what the planner is given, with all ranks busy"
        ),
        plain_figure(
            "all-reduce inside a host",
            [8.0 * found["within_bytes_per_s"] / 1e6],
            "Mbit/s",
            note="per rank, of one activation",
        ),
        plain_figure(
            "all-reduce between hosts",
            [8.0 * found["between_bytes_per_s"] / 1e6],
            "Mbit/s",
            note="per rank, of one activation",
        ),
    ]
    for case in wanted:
        figures += _figures(case, lines, rate_mbit=asked.rate, devices=asked.devices)
    print_report(
        f"rank order, {HOSTS} hosts of {asked.devices} ranks, {asked.rate:g} Mbit/s between",
        figures,
        as_json=asked.json,
    )
    return 0


def train(lab: Lab, wanted: list[OrderCase], *, devices: int, rounds: int) -> list[list[dict[str, Any]]]:
    """Run all ranks; return the lines that each of them printed."""
    arms = [arm for case in wanted for arm in case.arms()]
    asked = {"arms": arms, "rounds": rounds, "steps": STEPS, "shape": SHAPE, "devices": devices}
    print_progress(f"{HOSTS * devices} ranks, {rounds} rounds of {len(arms)} arms")
    ranks: list[subprocess.Popen[str]] = []
    for rank in range(HOSTS * devices):
        environment = {
            "RANK": rank,
            "WORLD_SIZE": HOSTS * devices,
            "MASTER_ADDR": lab.host("h0").address,
            "MASTER_PORT": 29500,
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": 1,
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONPATH": ROOT / "src",
        }
        words = ["env", *(f"{name}={value}" for name, value in environment.items())]
        words += [sys.executable, "-m", "benchmarks.rank_order_rank", json.dumps(asked)]
        ranks.append(lab.start(f"h{rank // devices}", words, stdout=subprocess.PIPE))
    outputs = [rank.communicate(timeout=HANG_S)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"ranks ended with {[rank.returncode for rank in ranks]}; their output is above")
    return [[json.loads(line) for line in text.splitlines()] for text in outputs]


def _figures(case: OrderCase, lines: list[list[dict[str, Any]]], *, rate_mbit: float, devices: int) -> list[Figure]:
    by_arm = {arm: _rounds(lines, f"{case.name}/{arm}") for arm in ("planned", "naive")}
    losses = {arm: [loss for _, loss, _ in rounds] for arm, rounds in by_arm.items()}
    apart = max(abs(a - b) / a for a, b in zip(losses["planned"], losses["naive"], strict=True))
    ratios = [
        slow / fast for (fast, _, _), (slow, _, _) in zip(by_arm["planned"], by_arm["naive"], strict=True)
    ]  # of the same round
    found = _found(lines)
    expected_s = [
        planned_s(layout, SHAPE, found, hosts=HOSTS, devices=devices) for layout in (case.planned, case.naive_seen)
    ]
    figures = []
    arms = (("planned", case.planned, case.seats_planned), ("naive", case.naive, case.seats_naive))
    for (arm, layout, seats), expect_s in zip(arms, expected_s, strict=True):
        sent = statistics.median(sent_bytes for _, _, sent_bytes in by_arm[arm])
        formula = traffic_bytes(layout, seats, devices)
        wire_s = formula * 8.0 / (rate_mbit * 1e6)
        note = f"{sent / 1e6:.1f} MB over the link, {formula / 1e6:.1f} by formula: {1e3 * wire_s:.0f} ms of wire; planner {1e3 * expect_s:.0f} ms"
        figures.append(
            plain_figure(f"{case.name} {arm}", [1e3 * step_s for step_s, _, _ in by_arm[arm]], "ms", note=note)
        )
    middle = statistics.median(ratios)
    learnt = f"losses from {losses['planned'][0]:.3f} to {losses['planned'][-1]:.3f}, {apart:.0e} apart"
    note = f"planner {expected_s[1] / expected_s[0]:.2f} x; {case.means}; {learnt}"
    figures.append(
        Figure(
            name=f"{case.name} ratio", value=middle, unit="x", runs=ratios, target="> 1 x", met=middle > 1.0, note=note
        )
    )
    return figures


def _found(lines: list[list[dict[str, Any]]]) -> dict[str, float]:
    """Return the rates that ranks measured before the first round: the median over ranks."""
    rows = [line for rank in lines for line in rank if line["arm"] == "rates"]
    return {name: statistics.median(row[name] for row in rows) for name in rows[0] if name != "arm"}


def _rounds(lines: list[list[dict[str, Any]]], arm: str) -> list[tuple[float, float, float]]:
    """Return per round: the step time of the slowest rank, the loss, and the bytes that the busier host sent."""
    found = []
    for rows in zip(*([line for line in rank if line["arm"] == arm] for rank in lines), strict=True):
        losses = [row["loss"] for row in rows if row["loss"]]
        found.append(
            (max(row["step_s"] for row in rows), statistics.mean(losses), max(row["sent_bytes"] for row in rows))
        )
    return found


def _bandwidth(lab: Lab, name: str, source: str, target: str) -> Figure:
    """Measure with plain sockets, one stream."""
    runs = []
    for _ in range(3):
        with lab.start(target, [sys.executable, "-S", STREAM, "sink"], stdout=subprocess.PIPE) as sink:
            assert sink.stdout is not None
            port = sink.stdout.readline().strip()
            runs.append(
                float(
                    lab.run(source, [sys.executable, "-S", STREAM, "send", lab.host(target).address, port, "10000000"])
                )
            )
    return plain_figure(f"bandwidth {name}", [bits / 1e6 for bits in runs], "Mbit/s")


def _innermost(axis: Axis) -> tuple[Axis, ...]:
    """Return the usual order with one axis moved to the inside."""
    return (axis, *(other for other in DEFAULT_AXIS_ORDER if other is not axis))


if __name__ == "__main__":
    sys.exit(main())
