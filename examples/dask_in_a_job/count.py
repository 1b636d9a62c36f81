"""A Dask cluster inside a job: rank 0 is the scheduler and the client, every other rank a worker."""

from __future__ import annotations

import asyncio
import os
import time

import dask

dask.config.set({"logging.distributed": "error"})  # before the import: no line for each connection

from distributed import Client, Scheduler, Worker  # noqa: E402

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
HOST, PORT = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
TASKS = 60


def square(number: int) -> int:
    """One task."""
    time.sleep(0.3)
    return number * number


async def lead() -> None:
    """Wait for all workers, compute, and end them."""
    async with (
        Scheduler(host=HOST, port=PORT, dashboard=False) as scheduler,
        Client(scheduler.address, asynchronous=True) as client,
    ):
        await client.wait_for_workers(SIZE - 1)
        print(f"step 0: {SIZE - 1} workers", flush=True)
        total = sum(await client.gather(client.map(square, range(TASKS))))
        print(f"done: sum {total}", flush=True)
        await client.shutdown()


async def work() -> None:
    """Serve until the scheduler ends."""
    until_s = time.monotonic() + 60.0
    while True:
        try:
            async with Worker(f"tcp://{HOST}:{PORT}", nthreads=1, dashboard=False) as worker:
                await worker.finished()
            break
        except (TimeoutError, OSError):  # the scheduler is not there yet
            if time.monotonic() > until_s:
                raise
            await asyncio.sleep(0.2)
    print("done: worker", flush=True)


if __name__ == "__main__":
    asyncio.run(lead() if RANK == 0 else work())
