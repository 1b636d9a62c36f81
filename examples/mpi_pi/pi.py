"""An MPI program: all ranks compute pi together, in steps. Start it by mpirun; it reads nothing that is Phalanx's."""

from __future__ import annotations

import time

from mpi4py import MPI

STEPS, POINTS = 40, 200_000

world = MPI.COMM_WORLD
print(f"rank {world.rank} of {world.size}", flush=True)
total = 0.0
for step in range(STEPS):
    first = step * POINTS + world.rank
    part = sum(
        4.0 / (1.0 + ((index + 0.5) / (STEPS * POINTS)) ** 2) for index in range(first, (step + 1) * POINTS, world.size)
    )
    total += world.allreduce(part, op=MPI.SUM)
    if world.rank == 0 and step % 10 == 0:
        print(f"step {step}", flush=True)
    time.sleep(0.1)
if world.rank == 0:
    print(f"done: pi {total / (STEPS * POINTS):.9f}", flush=True)
