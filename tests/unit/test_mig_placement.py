"""Where MIG slices are put, on the shipped geometries, and beside the most that trying all positions accepts."""

import random

import pytest

from benchmarks.mig_streams import accepted, best_rule, draw_stream, first_fit, most_accepted, our_rule
from phalanx.core.fleet.mig import MigSlice
from phalanx.core.scheduling.sharing.mig_placement import EMPTY, MigPosition, MigState, mig_geometry, place_slice
from phalanx.planner.facts.mig import find_mig_gpu, read_mig_gpus


def profiles_of(name):
    found = find_mig_gpu(name)
    assert found is not None
    return found.profiles


H100 = profiles_of("h100")


def taken(*slices):
    """The state of an H100 with slices such as `1g.10gb@6`."""
    sizes = {one.name: one.memory_slices for one in H100}
    parts = [one.split("@") for one in slices]
    return mig_geometry(H100).state(
        MigSlice(profile=name, start=int(start), memory_slices=sizes[name]) for name, start in parts
    )


def start_of(name, *slices, weights=None):
    found = place_slice(name, [(mig_geometry(H100, weights), taken(*slices))])
    return None if found is None else found.start


def test_small_slices_go_where_large_ones_do_not_fit_any_more():
    assert start_of("1g.10gb", "3g.40gb@4") in range(4)
    assert start_of("1g.10gb", "1g.10gb@5") in (
        4,
        6,
    )  # the half that is broken already, so that 3g and 4g fit in the other
    assert start_of("1g.20gb") == 6  # 2g cannot begin there, and the last memory slice is of use for nothing else
    assert start_of("3g.40gb") == 4  # 4g begins at 0 only
    assert start_of("7g.80gb", "1g.10gb@6") is None


def test_what_is_asked_for_decides_what_stays_open():
    assert start_of("2g.20gb", weights={"4g.40gb": 1}) == 4
    assert start_of("2g.20gb", weights={"3g.40gb": 1, "1g.20gb": 0}) in (0, 2, 4)
    assert start_of("1g.10gb", "2g.20gb@0", weights={"2g.20gb": 1}) == 6


def test_slices_are_gathered_on_the_gpu_that_has_some():
    geometry = mig_geometry(H100)
    gpus = [(geometry, EMPTY), (geometry, taken("2g.20gb@4")), (geometry, EMPTY)]
    assert place_slice("1g.10gb", gpus) == MigPosition(device=1, start=6)
    assert place_slice("7g.80gb", gpus) == MigPosition(device=0, start=0)
    assert place_slice("4g.24gb", gpus) is None  # another model's


def test_one_slice_has_the_media_extension():
    geometry = mig_geometry(H100)
    state = geometry.with_instance("1g.10gb+me", 6, EMPTY)
    assert geometry.starts("1g.10gb+me", state) == ()
    assert geometry.starts("1g.10gb", state) == (0, 1, 2, 3, 4, 5)
    assert geometry.room("1g.10gb+me", EMPTY) == 1


@pytest.mark.parametrize("gpu", read_mig_gpus(), ids=lambda gpu: gpu.name)
def test_the_tables_are_possible(gpu):
    geometry = mig_geometry(gpu.profiles)
    assert {one.name: geometry.room(one.name, EMPTY) for one in gpu.profiles} == {
        one.name: one.max_instances for one in gpu.profiles
    }
    most: dict[MigState, int] = {}

    def compute(state):  # the most processors that slices in the rest of the GPU use
        if state not in most:
            most[state] = max(
                (
                    one.compute_slices + compute(geometry.with_instance(one.name, start, state))
                    for one in gpu.profiles
                    for start in geometry.starts(one.name, state)
                ),
                default=0,
            )
        return most[state]

    assert compute(EMPTY) == gpu.compute_slices


def test_a_gpu_that_fills_up_and_empties_is_never_given_twice():
    rng = random.Random(7)
    geometry = mig_geometry(H100)
    held: list[MigSlice] = []
    for _ in range(300):
        name = rng.choice(list(geometry.profiles))
        found = place_slice(name, [(geometry, geometry.state(held))])
        size = geometry.profiles[name].memory_slices
        if found is None:
            held = rng.sample(held, len(held) // 2)
            continue
        new = set(range(found.start, found.start + size))
        assert all(new.isdisjoint(range(one.start, one.start + one.memory_slices)) for one in held)
        held.append(MigSlice(profile=name, start=found.start, memory_slices=size))


@pytest.mark.parametrize(("gpus", "requests", "load"), [(1, 30, 0.2), (2, 9, 0.3)])
def test_nearly_as_many_requests_are_accepted_as_with_knowledge_of_the_future(gpus, requests, load):
    rng = random.Random(1)
    streams = [draw_stream(rng, H100, gpus=gpus, requests=requests, load=load) for _ in range(25)]
    most = sum(most_accepted(stream, H100, gpus) for stream in streams)
    ours = sum(accepted(stream, gpus, our_rule(H100)) for stream in streams)
    first = sum(accepted(stream, gpus, first_fit(H100)) for stream in streams)
    assert first < ours <= most
    assert ours >= 0.99 * most


def test_without_knowledge_of_the_future_no_rule_accepts_notably_more():
    a30 = profiles_of("a30")
    stream = draw_stream(random.Random(2), a30, gpus=1, requests=400, load=0.8)
    assert accepted(stream, 1, our_rule(a30)) >= 0.99 * accepted(stream, 1, best_rule(stream, a30))
