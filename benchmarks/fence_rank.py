"""The rank of the fence drill: steps of 20 ms without collectives, so that only the fence can stop it. Each step writes a line.

    python benchmarks/fence_rank.py FOLDER [--bare]

With `--bare` it does not use `phalanx.torch`, only its environment. It then writes its own "state" to PHALANX_CHECKPOINT_DIR, like a script
with its own checkpoints.
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
    library = None if bare else importlib.import_module("phalanx.torch")
    if library is not None:
        library.init()
    step = 0
    while True:
        step += 1
        begun_ns = 0 if library is None else library.fence()
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        os.write(fd, f"{step} {begun_ns or now_ns} {now_ns}\n".encode())
        time.sleep(STEP_S)
        if library is not None:
            library.report(step=step, loss=1.0 / step)
        elif step % 50 == 0:
            with open(os.path.join(own, f"state-{rank}"), "w", encoding="ascii") as file:
                file.write(str(step))


if __name__ == "__main__":
    main()
