"""A pool of divided devices under any order of jobs: slices never overlap, what fits is found, and what is freed is free again."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.fleet.mig import DeviceMig, MigSlice, slice_bits
from phalanx.core.scheduling.needs import Need, Places
from phalanx.core.scheduling.pool import HeldShare
from phalanx.core.scheduling.sharing.mig_devices import DivisibleDevice
from phalanx.core.scheduling.sharing.mig_pool import MigPool
from phalanx.planner.facts.mig import read_mig_gpus

MODELS = read_mig_gpus()


@st.composite
def histories(draw):
    """A model, devices of each node (some with a slice of others), and jobs that come or go."""
    entry = draw(st.sampled_from(MODELS))
    profiles = {one.name: one for one in entry.profiles}
    taken = [
        MigSlice(profile=one.name, start=one.starts[-1], memory_slices=one.memory_slices) for one in entry.profiles
    ]
    mig = DeviceMig(on=True, profiles=entry.profiles)
    one_device = st.one_of(st.just(mig), st.sampled_from(taken).map(lambda one: replace(mig, slices=(one,))))
    nodes = draw(st.lists(st.lists(one_device, min_size=1, max_size=3), min_size=1, max_size=3))
    asked = st.tuples(st.sampled_from(sorted(profiles)), st.integers(1, 3), st.integers(1, 2))
    return profiles, nodes, draw(st.lists(st.one_of(asked, st.integers(0, 5)), max_size=25))


@given(histories())
def test_slices_never_overlap_and_what_fits_is_found(history):
    profiles, nodes, steps = history
    devices = {node: [DivisibleDevice(at, mig) for at, mig in enumerate(own)] for node, own in enumerate(nodes)}
    pool = MigPool([0] * len(nodes), devices)
    rooms = {(node, name): pool.slices.room(node, name) for node in devices for name in profiles}
    held: list[tuple[Need, Places, tuple[HeldShare, ...]]] = []
    for step in steps:
        if isinstance(step, int):
            if held:
                pool.release_shares(*held.pop(step % len(held)))
            continue
        name, slices, parts = step
        need = Need(nodes=parts, devices=0, mig_profile=name, mig_slices=slices, share_milli=1, share_group="mig")
        places = pool.find(need)
        roomy = sum(pool.slices.room(node, name) >= slices for node in devices)
        assert (places is not None) == (roomy >= parts)
        if places is not None:
            held.append((need, places, pool.hold_shares(need, places)))
        assert_apart(profiles, devices, held)
    for one in held:
        pool.release_shares(*one)
    assert {(node, name): pool.slices.room(node, name) for node in devices for name in profiles} == rooms


def assert_apart(profiles, devices, held):
    """No two slices share what they occupy, and each begins where its profile may."""
    taken = {
        (node, at): sum(slice_bits(one.start, one.memory_slices, one.profile) for one in device.mig.slices)
        for node, own in devices.items()
        for at, device in enumerate(own)
    }
    for need, places, parts in held:
        for (node, _), part in zip(places, parts, strict=True):
            assert len(part.slices) == need.mig_slices
            for one in part.slices:
                profile = profiles[one.profile]
                bits = slice_bits(one.start, profile.memory_slices, one.profile)
                assert one.start in profile.starts
                assert not taken[node, one.place] & bits
                taken[node, one.place] |= bits
