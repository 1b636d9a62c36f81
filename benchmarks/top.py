"""Measure how long `phalanx top` needs to draw a large fleet: 1,000 nodes x 8 GPUs on a screen of 200 x 50.

    python -m benchmarks.top [--nodes 1000] [--runs 20] [--json]

The real application runs with a driver without a terminal. A redraw is what follows each answer of the head: all widgets get their new
content, and the whole screen is composed and written as text. Processor time, since other work of the machine would count otherwise.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from benchmarks.figures import argument_parser, at_most, print_report
from phalanx.cli.top.screen import TopApp
from phalanx.core.ids import JobId, NodeId, ProjectId, QueueId, UserId
from phalanx.core.work.states import JobState
from phalanx.wire.api.cell_states import CellState
from phalanx.wire.api.fleet import FleetFrame
from phalanx.wire.api.head import Overview
from phalanx.wire.api.jobs import JobView

if TYPE_CHECKING:
    from phalanx.client import Client

RANGES: Final = Path(__file__).parent / "ranges" / "dashboard.json"
SIZE: Final = (200, 50)
GPUS: Final = 8
JOBS: Final = 200  # running, and as many waiting: what an overview has
_WARM: Final = 2  # redraws before those that count
_LETTERS: Final = "".join(state.letter for state in CellState)


class DrawnHead:
    """A head whose fleet is drawn by chance; each answer differs from the one before."""

    def __init__(self, nodes: int, seed: int = 1) -> None:
        self._random = random.Random(seed)
        self._nodes = [NodeId(f"gpu{number:05}") for number in range(nodes)]

    def overview(self) -> Overview:
        """Return the jobs."""
        return Overview(
            now_s=time.time(),
            head_id="drawn",
            version="0",
            nodes=[],
            running=[self._job(number, JobState.RUNNING) for number in range(JOBS)],
            pending=[self._job(JOBS + number, JobState.PENDING) for number in range(JOBS)],
            recent=[],
            counts={JobState.RUNNING: JOBS, JobState.PENDING: JOBS},
        )

    def fleet(self) -> FleetFrame:
        """Return the state of every GPU, each of its own: the slowest to draw."""
        return FleetFrame(
            now_s=time.time(),
            nodes=self._nodes,
            places=[f"rack r{at // 32:03}" for at in range(len(self._nodes))],
            states=["up"] * len(self._nodes),
            cells=["".join(self._random.choices(_LETTERS, k=GPUS)) for _ in self._nodes],
            jobs=[[JobId(str(at))] for at in range(len(self._nodes))],
            counts={},
        )

    def _job(self, number: int, state: JobState) -> JobView:
        return JobView(
            id=JobId(str(number)),
            seq=number,
            name=f"train-{number}",
            state=state,
            user=UserId("ada"),
            project=ProjectId("default"),
            queue=QueueId("default"),
            submit_s=time.time() - self._random.random() * 1e5,
            gpus="16",
            gpu_count=16,
            shape="2x8",
            nodes=self._nodes[:2] if state is JobState.RUNNING else [],
        )


async def redraws_ms(nodes: int, runs: int) -> list[float]:
    """Return the processor time of each redraw, in ms."""
    head = DrawnHead(nodes)
    app = TopApp(cast("Client", head), head.overview(), head.fleet())
    found = []
    app._watch = lambda: None  # type: ignore[method-assign]  # noqa: SLF001  # the benchmark asks the head itself
    async with app.run_test(size=SIZE) as pilot:
        for number in range(runs + _WARM):
            seen, frame = head.overview(), head.fleet()
            await pilot.pause()
            began = time.process_time()
            app.draw(seen, frame)
            await pilot.pause()
            if number >= _WARM:
                found.append(1000 * (time.process_time() - began))
    return found


def main() -> None:
    """Measure and print."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--nodes", type=int, default=1_000)
    given = parser.parse_args()
    bound: dict[str, Any] = json.loads(RANGES.read_text(encoding="utf-8"))["top_redraw_ms"]
    runs = asyncio.run(redraws_ms(given.nodes, given.runs or 20))
    figure = at_most("top_redraw_ms", runs, bound["unit"], bound["bound"], note=bound["origin"])
    if given.json:
        print(
            json.dumps(
                {
                    "top_redraw_ms": float(f"{statistics.median(runs):.4g}"),
                    "missed": [] if figure.met else ["top_redraw_ms"],
                }
            )
        )
        return
    print_report(f"phalanx top, {given.nodes * GPUS} GPUs", [figure], as_json=False)


if __name__ == "__main__":
    main()
