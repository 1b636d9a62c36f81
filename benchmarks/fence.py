"""Fence drill: stop a whole node for longer than its lease, wake it, and count the steps of its old ranks.

    python -m benchmarks.fence [--rounds 50] [--bare] [--lease 2] [--json]

With `phalanx.torch` no old rank may begin a step after the first step of the new attempt. A step counts as begun when the fence was found
open. A node may stop between that check and the first instruction of the step, and then wakes inside a step: such steps are counted
separately. No host that may stop at any time can prevent them, and their results are discarded. A bare script has no fence: its steps
between its wake-up and that of its supervisor are counted and printed. In both cases nothing that it wrote is resumed.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from benchmarks.cluster import (
    ROOT,
    BenchmarkCluster,
    cluster,
    command_words,
    wait_until,
)
from benchmarks.figures import (
    Figure,
    argument_parser,
    plain_figure,
    print_progress,
    print_report,
)

SCRIPT = os.path.join(ROOT, "benchmarks", "fence_rank.py")


def main() -> int:
    """Run the drill; exit with 1 if an old rank began a step after the fence, or state of an old epoch was resumed."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--lease", type=float, default=2.0)
    given = parser.parse_args()
    rounds = [drill_round(number, bare=given.bare, lease_s=given.lease) for number in range(given.rounds)]
    late, under_way, resumed, back_s = zip(*rounds, strict=True)
    kind = "bare script" if given.bare else "phalanx.torch"
    figures = [
        Figure(
            name=f"steps begun by old ranks after the new attempt's first, {kind}",
            value=float(sum(late)),
            unit="steps",
            runs=[float(count) for count in late],
            target="0 steps" if not given.bare else "",
            met=None if given.bare else not any(late),
        ),
        plain_figure(
            "steps that were under way when the node was stopped, and ended after its wake",
            list(map(float, under_way)),
            "steps",
        ),
        Figure(
            name="things of an old epoch that were resumed",
            value=float(sum(resumed)),
            unit="",
            runs=[float(r) for r in resumed],
            target="0",
            met=not any(resumed),
        ),
        plain_figure(
            "node stopped to a step of the new attempt",
            list(back_s),
            "s",
            note=f"lease {given.lease:g} s, {given.rounds} rounds",
        ),
    ]
    print_report("Fence drill", figures, as_json=given.json)
    return int(any(resumed) or (not given.bare and any(late)))


def drill_round(number: int, *, bare: bool, lease_s: float) -> tuple[int, int, int, float]:
    """Run one round.

    Returns:
        Late steps of the old ranks, their steps that were in progress, resumed states of theirs, and the seconds from the stop to the first
        step of the new attempt.
    """
    with cluster("3x1", lease_s=lease_s) as head:
        folder = os.path.join(head.home, "drill")
        os.makedirs(folder)
        command = [sys.executable, SCRIPT, folder, *(["--bare"] if bare else [])]
        job = head.submit(run=command, gpus="2x1", name="drill", grace="2s")
        wait_until(lambda: _steps(folder, 1, 0) and _steps(folder, 1, 1), "both ranks make steps")
        victim = head.job(job)["nodes"][number % 2]
        pids = head.node_pids(victim)
        ranks = [pid for pid in pids if SCRIPT in command_words(pid)]
        stopped_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        head.kill_node(victim, signal.SIGSTOP)
        wait_until(lambda: _steps(folder, 2, 0) and _steps(folder, 2, 1), "the new attempt makes steps")
        first_ns = min(_steps(folder, 2, 0)[0][0], _steps(folder, 2, 1)[0][0])
        for pid in pids:
            _continue(pid)
        wait_until(lambda: _gone(ranks), "the old ranks have ended", limit_s=60)
        time.sleep(0.2)  # until a step in progress has written its line
        old = [step for rank in (0, 1) for step in _steps(folder, 1, rank)]
        late = sum(begun_ns > first_ns for begun_ns, _ in old)
        under_way = sum(begun_ns <= first_ns < now_ns for begun_ns, now_ns in old)
        resumed = _resumed(head, job)
        print_progress(
            f"round {number + 1}: {victim} slept {(first_ns - stopped_ns) / 1e9:.1f} s; late steps {late}, under way {under_way}, resumed {resumed}"
        )
        return late, under_way, resumed, (first_ns - stopped_ns) / 1e9


def _steps(folder: str, epoch: int, rank: int) -> list[tuple[int, int]]:
    """Return when each step of a rank began and when its first instruction ran, in CLOCK_BOOTTIME ns."""
    try:
        with open(os.path.join(folder, f"steps-{epoch}-{rank}"), encoding="ascii") as file:
            lines = [line.split() for line in file.read().split("\n")[:-1]]
            return [(int(begun), int(now)) for _, begun, now in lines]
    except FileNotFoundError:
        return []


def _continue(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return


def _gone(pids: list[int]) -> bool:
    return not any(command_words(pid) for pid in pids)


def _resumed(head: BenchmarkCluster, job: str) -> int:
    attempts = head.call("GET", f"/v1/jobs/{job}")["attempts"]
    return sum(attempt["resume_step"] is not None for attempt in attempts)


if __name__ == "__main__":
    sys.exit(main())
