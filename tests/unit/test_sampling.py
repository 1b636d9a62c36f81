"""The order of samples: a permutation, the same for any number of ranks, and quickly found again."""

# Ids are written as plain words here.
# mypy: disable-error-code="var-annotated"

import itertools
import random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from torch.utils.data import DataLoader

from phalanx.torch.permutation import SIZE_MAX, Permutation
from phalanx.torch.sampling import ElasticSampler, ElasticShards, sampler
from phalanx.torch.sampling_adapters import RankBatches, litdata_shards

pytestmark = pytest.mark.torch
WORLDS = (1, 2, 3, 4, 6)


@given(st.integers(1, 3000), st.integers(-(2**70), 2**70), st.integers(0, 50))
@settings(max_examples=60)
def test_every_number_comes_once(n, seed, epoch):
    assert sorted(Permutation(n, seed, epoch)(range(n)).tolist()) == list(range(n))


def test_orders_of_large_sizes_stay_inside_and_repeat():
    for n in (10**9, 2**40 + 1, SIZE_MAX):
        order = Permutation(n, 1, 2)
        places = [0, 1, n // 2, n - 1]
        found = order(places).tolist()
        assert all(0 <= number < n for number in found)
        assert len(set(found)) == 4
        assert [int(order(place)[0]) for place in places] == found


@pytest.mark.parametrize("n", [0, -1, SIZE_MAX + 1])
def test_sizes_that_are_none_are_refused(n):
    with pytest.raises(ValueError, match="n is"):
        Permutation(n, 0, 0)


def test_places_outside_are_refused():
    for place in (-1, 10):
        with pytest.raises(IndexError):
            Permutation(10, 0, 0)([place])


def test_the_order_looks_random():
    """Chi-square over where each tenth of the places goes, and over neighbours; no epoch resembles the next. Bounds of 5 standard deviations."""
    n, cells = 100_000, 10
    order = Permutation(n, 3, 0)(range(n)).numpy()
    counts = np.histogram2d(np.arange(n), order, bins=cells)[0]
    expected = n / cells**2
    chi = float(((counts - expected) ** 2 / expected).sum())
    freedom = (cells - 1) ** 2
    assert abs(chi - freedom) < 5 * np.sqrt(2 * freedom), chi
    other = Permutation(n, 3, 1)(range(n)).numpy()
    for left, right in ((order[:-1], order[1:]), (order, other), (order, np.arange(n))):
        assert abs(np.corrcoef(left, right)[0, 1]) < 5 / np.sqrt(n)
    assert abs(int((order == np.arange(n)).sum()) - 1) <= 5, "fixed points: one is expected"


def of_all_ranks(n, world, batches, start=0, **more):
    made = [ElasticSampler(n, rank=rank, world_size=world, **more) for rank in range(world)]
    return [
        [index for one in made for index in one.indices(batch) if one_counts(one, batch)]
        for batch in range(start, start + batches)
    ]


def one_counts(one, batch):
    one.position = batch + 1
    return one.weight > 0


@pytest.mark.parametrize(("n", "global_batch"), [(100, 10), (103, 10), (7, 12), (64, 64), (5, 1)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_all_numbers_of_ranks_see_the_same_batches_and_each_sample_once_an_epoch(n, global_batch, drop_last):
    if drop_last and global_batch > n:
        with pytest.raises(ValueError, match="leaves nothing"):
            sampler(n, 1, global_batch, drop_last=True)
        return
    length = len(sampler(n, 1, global_batch, drop_last=drop_last))
    runs = {
        world: of_all_ranks(n, world, 3 * length, seed=1, global_batch=global_batch, drop_last=drop_last)
        for world in WORLDS
    }
    assert all(found == runs[1] for found in runs.values())
    for epoch in range(3):
        seen = list(itertools.chain(*runs[1][epoch * length : (epoch + 1) * length]))
        assert len(seen) == len(set(seen)) == (n - n % global_batch if drop_last else n)
    if n > 50:
        assert runs[1][0] != runs[1][length], "another order in the next epoch"


def test_weights_make_the_average_of_ranks_the_mean_of_the_batch():
    values = np.random.default_rng(0).normal(size=103)
    for world, batch in itertools.product(WORLDS, (0, 9, 10)):
        made = [ElasticSampler(103, seed=1, global_batch=10, rank=rank, world_size=world) for rank in range(world)]
        total = 0.0
        for one in made:
            mine = one.indices(batch)
            one.position = batch + 1
            total += values[mine].mean() * one.weight / world
        assert total == pytest.approx(values[made[0].global_indices(batch)].mean())


def test_a_loader_that_runs_ahead_moves_no_position_and_a_resume_goes_on():
    made = sampler(20, 5, 4, rank=0, world_size=1)
    whole = [list(batch) for batch in made]
    assert made.position == 0
    ahead = list(made)  # as a loader with workers does
    seen = []
    for batch in made.counted(ahead):
        seen.append(batch)
        if len(seen) == 2:
            break
    again = sampler(20, 5, 4, rank=0, world_size=1)
    again.load_state_dict(made.state_dict())
    assert (again.position, again.epoch) == (2, 0)
    again.set_epoch(0)
    assert seen + list(again.counted(again)) == whole
    assert (again.position, again.epoch) == (5, 1)
    assert list(again) != whole
    again.set_epoch(3)
    assert again.position == 15


def test_the_state_of_an_iterator_holds_what_it_yielded_and_sets_the_position():
    """A loader with workers asks for batches ahead; torchdata keeps the iterator's state for the batch that it gave."""
    made = sampler(20, 5, 4, rank=0, world_size=1)
    made.position = 6
    ahead = iter(made)
    whole = [next(ahead)]
    state = ahead.state_dict()
    whole += list(ahead)
    assert (state, made.position) == ({"position": 7}, 6)
    again = sampler(20, 5, 4, rank=0, world_size=1)
    resumed = iter(again)
    resumed.load_state_dict(state)
    assert again.position == 7
    assert list(resumed) == whole[1:]


def test_batches_reached_by_number_are_those_of_the_sampler_over_all_epochs():
    names = [f"sample {number}" for number in range(20)]
    made = ElasticSampler(20, seed=5, global_batch=6, rank=1, world_size=2)
    batches = RankBatches(names, made, epochs=2)
    assert len(batches) == 8
    assert [list(batches[batch]) for batch in (0, 7)] == [[names[at] for at in made.indices(batch)] for batch in (0, 7)]
    for outside in (8, -1):
        with pytest.raises(IndexError, match="of 8"):
            batches[outside]


def test_without_shuffle_the_order_is_that_of_the_dataset():
    assert list(sampler(5, 0, 2, shuffle=False, rank=0, world_size=1)) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    "given", [{"n": 0}, {"global_batch": 0}, {"rank": 2, "world_size": 2}, {"rank": -1, "world_size": 2}]
)
def test_arguments_that_make_no_sense_are_refused(given):
    with pytest.raises(ValueError, match=r"n is|global_batch is|rank"):
        ElasticSampler(**{"n": 10, "global_batch": 2, "rank": 0, "world_size": 1, **given})


def test_rank_and_world_size_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    made = sampler(10, 0, 6)
    assert (made.rank, made.world_size) == (1, 3)


# ---- shards -----------------------------------------------------------------------------------------------------------

LENGTHS = [17, 3, 40, 1, 9, 25, 30]


def reader(opened=None):
    def read(shard, offset):
        if opened is not None:
            opened.append((shard, offset))
        return ((shard, place) for place in range(offset, LENGTHS[shard]))

    return read


def shards(world, position=0, opened=None):
    made = [
        ElasticShards(LENGTHS, reader(opened), seed=2, global_batch=24, rank=rank, world_size=world)
        for rank in range(world)
    ]
    for one in made:
        one.position = position
    return made


def batches(made):
    return [list(itertools.chain(*parts)) for parts in zip(*made, strict=True)]


def test_shards_give_any_number_of_ranks_the_same_batches_and_each_sample_once():
    whole = batches(shards(1))
    for world in (2, 3, 4, 6, 12):
        assert batches(shards(world)) == whole
    seen = list(itertools.chain(*whole))
    assert sorted(seen) == [(shard, place) for shard, length in enumerate(LENGTHS) for place in range(length)]


def test_shards_resume_in_the_middle_on_another_number_of_ranks_by_an_offset():
    whole, chance = batches(shards(1)), random.Random(1)
    for _ in range(10):
        start, opened = chance.randrange(len(whole)), []
        assert batches(shards(chance.choice((1, 2, 3, 4, 6)), start, opened)) == whole[start:]
    second = batches(shards(1, len(whole)))
    assert sorted(itertools.chain(*second)) == sorted(itertools.chain(*whole))
    assert second != whole


@pytest.mark.parametrize(
    ("lengths", "global_batch", "world", "why"),
    [([], 24, 1, "a sample"), ([1, 0], 24, 1, "a sample"), ([9], 25, 1, "do not divide"), ([9], 24, 5, "ranks do not")],
)
def test_shards_that_do_not_divide_are_refused(lengths, global_batch, world, why):
    with pytest.raises(ValueError, match=why):
        ElasticShards(lengths, reader(), global_batch=global_batch, rank=0, world_size=world)


def test_a_loader_takes_shards_as_its_dataset():
    loader = DataLoader(shards(1, 2)[0], batch_size=None, collate_fn=list)
    assert list(loader) == batches(shards(1))[2:]


def test_the_chunks_of_litdata_are_shards():
    class Streaming(list):
        """What `litdata_shards` uses of a StreamingDataset: the index, whose chunk 1 is used in part, and samples by number."""

        @property
        def shuffler(self):
            return self

        @property
        def cache(self):
            return self

        def get_len(self, workers, size):
            return len(self)

        def get_chunk_intervals(self):
            return [(0, 0, 10, 10), (10, 12, 15, 20), (20, 20, 33, 33)]

    made = litdata_shards(Streaming(range(26)), seed=1, global_batch=4, streams=2, rank=0, world_size=1)
    seen = list(itertools.chain(*made))
    assert sorted(seen) == list(range(26))
    assert seen != sorted(seen)
