"""The rank of the fence drill: steps of 20 ms without collectives, so that nothing but the fence can stop it. Each step leaves a line.

    python benchmarks/fence_rank.py FOLDER [--bare]

With `--bare` it knows nothing of Phalanx but its environment, as a stranger's script. It writes a "state" of its own beside the lines,
as a script that saves by itself would, into PHALANX_CHECKPOINT_DIR.
"""

from __future__ import annotations

import importlib
import os
import sys
import time

STEP_S = 0.02


def main() -> None:
    """Make steps until killed."""
    folder, bare = sys.argv[1], "--bare" in sys.argv
    epoch, rank = int(os.environ["PHALANX_EPOCH"]), int(os.environ["RANK"])
    fd = os.open(os.path.join(folder, f"steps-{epoch}-{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    own = os.environ["PHALANX_CHECKPOINT_DIR"]
    os.makedirs(own, exist_ok=True)
    watched = None if bare else importlib.import_module("phalanx.torch")
    if watched is not None:
        watched.init()
    step = 0
    while True:
        step += 1
        begun_ns = 0 if watched is None else watched.fence()
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        os.write(fd, f"{step} {begun_ns or now_ns} {now_ns}\n".encode())
        time.sleep(STEP_S)
        if watched is not None:
            watched.report(step=step, loss=1.0 / step)
        elif step % 50 == 0:
            with open(os.path.join(own, f"state-{rank}"), "w", encoding="ascii") as file:
                file.write(str(step))


if __name__ == "__main__":
    main()
