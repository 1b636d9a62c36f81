"""Which samples a rank trains on: an order that depends on seed, epoch and place alone, whatever the number of ranks.

A job that resumes, on as many ranks or on others, goes on with the next sample of the same global order. The position is one number, the
batches that were trained; nothing else is in the checkpoint, and no array of indices is made.

    order = phalanx.torch.sampler(len(dataset), seed=1, global_batch=256)
    loader = DataLoader(dataset, batch_sampler=order, num_workers=4)
    order.position = resumed_step                        # or order.load_state_dict(...)
    for batch in order.counted(loader):                  # one epoch, or what is left of it
        loss = model(batch).mean() * order.weight        # see `weight`
        ...
"""

from __future__ import annotations

import operator
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Final, TypeVar

import torch.utils.data

from phalanx.torch.permutation import Permutation

T = TypeVar("T")

_STATE: Final = "position"


class _Position:
    """Counts trained batches over all epochs; the position is all that a checkpoint needs."""

    position: int = 0

    def __len__(self) -> int:
        """Batches of an epoch."""
        raise NotImplementedError

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self.position // len(self)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, unless the position is inside it, as after a resume."""
        if epoch != self.epoch:
            self.position = epoch * len(self)

    def counted(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield what a loader yields, and count it: during the body of the loop, `position` includes the batch. Save after the optimizer's step."""
        for data in loader:
            self.position += 1
            yield data

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {_STATE: self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position."""
        self.position = operator.index(state[_STATE])


class ElasticSampler(_Position):
    """A batch sampler: it yields the indices of this rank for one global batch after another, to the end of the epoch.

    Every sample comes once an epoch, on one rank. The last batch of an epoch is smaller if `global_batch` does not divide `n`, unless
    `drop_last` leaves it out. A rank that has no sample of a batch (fewer samples than ranks) gets one with weight 0.

    Args:
        n: samples of the dataset.
        seed: of the order; the same on all ranks.
        global_batch: samples in one step of all ranks together.
        shuffle: False for the order of the dataset.
        drop_last: leave out the last samples of each epoch's order that make no whole batch; they are others in each epoch.
        rank, world_size: of this process; from RANK and WORLD_SIZE, else 0 and 1.

    Attributes:
        position: batches that were trained, over all epochs.

    Raises:
        ValueError: a size is out of range.
    """

    def __init__(
        self,
        n: int,
        *,
        seed: int = 0,
        global_batch: int,
        shuffle: bool = True,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.n, self.seed, self.global_batch = operator.index(n), operator.index(seed), operator.index(global_batch)
        self.shuffle, self.drop_last = shuffle, drop_last
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self.world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
        if self.n < 1:
            raise ValueError(f"n is {self.n}: the dataset has no samples")
        if self.global_batch < 1:
            raise ValueError(f"global_batch is {self.global_batch}: use 1 or more")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size}: ranks are 0 to world_size - 1")
        if drop_last and self.global_batch > self.n:
            raise ValueError(f"global_batch {self.global_batch} is over n = {self.n}, so drop_last leaves nothing")
        self.position = 0
        self._order: tuple[int, Permutation] | None = None

    def __len__(self) -> int:
        """Batches of an epoch."""
        whole, rest = divmod(self.n, self.global_batch)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> BatchIterator:
        """This rank's indices, batch by batch, from the position to the end of its epoch. A loader may run ahead: that moves no position."""
        return BatchIterator(self)

    def indices(self, batch: int) -> list[int]:
        """Return this rank's indices for a batch, counted over all epochs."""
        begin, end = self._share(batch)
        if begin == end:
            begin, end = 0, 1  # with weight 0
        return self.global_indices(batch, begin, end)

    def global_indices(self, batch: int, begin: int = 0, end: int | None = None) -> list[int]:
        """Return the indices of all ranks for a batch, in their order, or a part of them."""
        epoch, within = divmod(batch, len(self))
        first = within * self.global_batch
        size = self._size(batch)
        places = torch.arange(first + begin, first + (size if end is None else end))
        found: list[int] = places.tolist()
        if not self.shuffle:
            return found
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, Permutation(self.n, self.seed, epoch)
        found = self._order[1](places).tolist()
        return found

    @property
    def weight(self) -> float:
        """Factor for this rank's mean loss of the batch in `counted`, so that the average over ranks is the mean over the global batch.

        1 if all ranks have as many samples.
        """
        begin, end = self._share(max(self.position - 1, 0))
        return (end - begin) * self.world_size / self._size(max(self.position - 1, 0))

    def _size(self, batch: int) -> int:
        within = batch % len(self)
        return min(self.global_batch, self.n - within * self.global_batch)

    def _share(self, batch: int) -> tuple[int, int]:
        """This rank's part of a batch: as equal as possible, and in the order of ranks."""
        size = self._size(batch)
        return size * self.rank // self.world_size, size * (self.rank + 1) // self.world_size


class BatchIterator(Iterator[list[int]]):
    """What iterates over an `ElasticSampler`. Its state is a position too: torchdata's StatefulDataLoader keeps it for the batches it has yielded."""

    def __init__(self, order: ElasticSampler) -> None:
        self._order = order
        self._start()

    def __next__(self) -> list[int]:
        """The indices of this rank for the next batch of the epoch."""
        if self._batch == self._end:
            raise StopIteration
        self._batch += 1
        return self._order.indices(self._batch - 1)

    def state_dict(self) -> dict[str, int]:
        """Return the position after the batches that were yielded."""
        return {_STATE: self._batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position, with the sampler."""
        self._order.load_state_dict(state)
        self._start()

    def _start(self) -> None:
        self._batch = self._order.position
        self._end = (self._order.epoch + 1) * len(self._order)


def sampler(n: int, seed: int = 0, global_batch: int = 1, **given: Any) -> ElasticSampler:
    """Return an `ElasticSampler`: the batch sampler of a DataLoader, with the same global order on any number of ranks."""
    return ElasticSampler(n, seed=seed, global_batch=global_batch, **given)


class ElasticShards(_Position, torch.utils.data.IterableDataset[list[Any]]):
    """An iterable over shards that are read from front to back, such as tar or Parquet files, in an order that no number of ranks changes.

    The shards of an epoch are put into a random order and their samples counted through. `streams` readers each have an equal part of them, and
    every global batch takes as many samples of each. A rank has `streams / world_size` readers, so any number of ranks that divides `streams`
    sees the same batches: 12 serves 1, 2, 3, 4, 6 and 12. Every sample comes once an epoch; the last batch is smaller.

    Args:
        lengths: samples in each shard.
        read: opens shard `number` at sample `offset`, and yields its samples from there.
        seed, global_batch, rank, world_size: as of `ElasticSampler`; `streams` divides `global_batch`.
        streams: number of readers.

    Raises:
        ValueError: the numbers do not divide each other, or a shard is empty.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        read: Callable[[int, int], Iterable[T]],
        *,
        seed: int = 0,
        global_batch: int,
        streams: int = 12,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self.world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
        if not lengths or min(lengths) < 1:
            raise ValueError("each shard must have a sample")
        if global_batch % streams:
            raise ValueError(f"{streams} streams do not divide a global batch of {global_batch}")
        if streams % self.world_size:
            raise ValueError(f"{self.world_size} ranks do not divide {streams} streams")
        self._lengths, self._read, self.seed = list(lengths), read, seed
        self.n, self.streams, self.per_stream = sum(lengths), streams, global_batch // streams
        self.position = 0

    def __len__(self) -> int:
        """Batches of an epoch."""
        taken = self.streams * self.per_stream
        return (self.n + taken - 1) // taken

    def __iter__(self) -> Iterator[list[Any]]:
        """This rank's samples, batch by batch, from the position to the end of its epoch.

        Raises:
            RuntimeError: in one of several workers of a loader, as each would read everything.
        """
        worker = torch.utils.data.get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise RuntimeError("use num_workers=1: each worker of a loader would read all samples of this rank")
        epoch, done = divmod(self.position, len(self))
        mine = range(self.rank * self.streams // self.world_size, (self.rank + 1) * self.streams // self.world_size)
        readers = [self._stream(epoch, stream, done * self.per_stream) for stream in mine]
        for _ in range(done, len(self)):
            yield [sample for reader in readers for sample in _take(reader, self.per_stream)]

    def _begin(self, stream: int) -> int:
        """The first sample of a stream in the order of the epoch."""
        return stream * self.n // self.streams

    def _stream(self, epoch: int, stream: int, skipped: int) -> Iterator[Any]:
        order = Permutation(len(self._lengths), self.seed, epoch)(range(len(self._lengths))).tolist()
        ends = list(accumulate(self._lengths[number] for number in order))
        place, end = self._begin(stream) + skipped, self._begin(stream + 1)
        while place < end:
            at = bisect_right(ends, place)
            offset = place - (ends[at] - self._lengths[order[at]])
            count = min(end, ends[at]) - place
            yield from _take(iter(self._read(order[at], offset)), count)
            place += count


def _take(source: Iterator[Any], count: int) -> list[Any]:
    found: list[Any] = []
    for sample in source:
        found.append(sample)
        if len(found) == count:
            break
    return found
