"""One rank of `test_loader_libraries`: runs an example of docs/sampling.md, which begins with the given line, and writes each batch that it trains.

    python -m tests.torch.loader_libraries FOLDER PHASE BATCHES "# grain"

Rank 0 saves what the example saves. After so many batches the ranks wait: the test kills them, and starts as many as it likes again. 0: train to the end.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SAMPLES, EPOCHS, GLOBAL_BATCH = 257, 3, 24
PAGE = Path(__file__).resolve().parents[2] / "docs" / "sampling.md"


def example(first_line: str) -> str:
    """Return the block of the page that begins with this line."""
    blocks = re.findall(r"```python\n(.+?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    (found,) = (block for block in blocks if block.startswith(first_line + "\n"))
    return str(found)


class Numbers(torch.utils.data.Dataset):
    """A dataset whose samples are their numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> int:
        if not 0 <= number < SAMPLES:
            raise IndexError(number)
        return number


def main(folder: Path, phase: str, batches: int, first_line: str) -> None:
    """Train to the end, or until the test kills this process."""
    trained = 0
    rank, saved = os.environ["RANK"], folder / "saved.pt"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store-{phase}", rank=int(rank), world_size=int(os.environ["WORLD_SIZE"])
    )
    with (folder / f"batches-{phase}-{rank}").open("w", encoding="utf-8") as file:

        def train(batch: Any) -> None:
            nonlocal trained
            trained += 1
            if batches and trained > batches:
                signal.pause()
            order = space["order"]
            mine = batch if getattr(order, "weight", 1) else []  # a rank without a sample gets one with weight 0
            file.write(json.dumps([order.position, [int(number) for number in mine]]) + "\n")
            file.flush()
            dist.barrier()  # as the gradients of a real training

        def save(state: Any) -> None:
            if rank == "0":
                torch.save(state, folder / "new.pt")
                (folder / "new.pt").replace(saved)

        resumed = torch.load(saved, weights_only=True) if saved.exists() else None
        space: dict[str, Any] = {
            "dataset": Numbers(),
            "folder": str(folder / "chunks"),
            "resumed": resumed,
            "train": train,
            "save": save,
        }
        exec(compile(example(first_line), str(PAGE), "exec"), space)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
