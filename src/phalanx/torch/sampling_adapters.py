"""Puts the order of `sampling` into loaders of other libraries: Grain's by batches that are reached by number, litdata's by its chunks as shards.

Imports none of them: it uses what their objects have. torchdata's StatefulDataLoader needs no adapter but `BatchIterator`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Protocol

from phalanx.torch.sampling import ElasticSampler, ElasticShards


class Reachable(Protocol):
    """A dataset whose samples are reached by number, such as a list, a map-style dataset of torch, or a data source of Grain."""

    def __getitem__(self, number: int, /) -> Any:
        """Return a sample."""
        ...


class RankBatches(Sequence[list[Any]]):
    """This rank's samples of each global batch, reached by the number of the batch over all epochs.

    It is a data source for Grain, whose own iterators then count batches: `grain.MapDataset.source(batches)[order.position:]`.

    Args:
        samples: the dataset.
        order: of its samples.
        epochs: how many; the length is that of all.
    """

    def __init__(self, samples: Reachable, order: ElasticSampler, *, epochs: int = 1) -> None:
        self._samples, self._order, self._epochs = samples, order, epochs

    def __len__(self) -> int:
        """Batches of all epochs."""
        return self._epochs * len(self._order)

    def __getitem__(self, batch: Any) -> Any:
        """Return the samples of a batch.

        Raises:
            IndexError: there is no such batch.
        """
        if not 0 <= batch < len(self):
            raise IndexError(f"batch {batch} of {len(self)}")
        return [self._samples[index] for index in self._order.indices(batch)]


def litdata_shards(dataset: Any, **given: Any) -> ElasticShards:
    """Return `ElasticShards` over the chunks of litdata's StreamingDataset, whose `transform` and `subsample` hold.

    Its own order, distribution and state are not used. Each sample is read by its number: at once from a local folder, by two requests from a store.

    Args:
        dataset: a `litdata.StreamingDataset`.
        given: as for `ElasticShards`: seed, global_batch, streams, rank, world_size.

    Raises:
        ValueError: as for `ElasticShards`.
    """
    dataset.get_len(1, 1)  # reads the index of chunks
    lengths = [end - begin for _, begin, end, _ in dataset.shuffler.cache.get_chunk_intervals()]
    begins = [0, *accumulate(lengths)]

    def read(shard: int, offset: int) -> Iterator[Any]:
        return (dataset[number] for number in range(begins[shard] + offset, begins[shard + 1]))

    return ElasticShards(lengths, read, **given)
