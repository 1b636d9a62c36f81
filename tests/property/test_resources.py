"""Amounts as one vector: addition and subtraction are exact, `fits` agrees with them, and the order is total."""

from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.resources import NO_RESOURCES, Resources, extras_of
from phalanx.core.units import GIB

amounts = st.integers(-8, 8)
extras = st.dictionaries(st.sampled_from(["matlab", "nic", "scratch"]), amounts).map(
    lambda found: extras_of(found.items())
)
vectors = st.builds(Resources, amounts, amounts, amounts, extras)


@given(vectors, vectors, vectors)
def test_sums_do_not_depend_on_their_order_and_are_undone_exactly(one, two, three):
    assert one + two == two + one
    assert (one + two) + three == one + (two + three)
    assert one + two - two == one
    assert one + NO_RESOURCES == one
    assert one - one == NO_RESOURCES
    assert not one - one
    assert one - two == one + -two


@given(vectors, st.integers(-3, 3))
def test_a_multiple_is_a_repeated_sum(one, times):
    sign = one if times >= 0 else -one
    assert one * times == sum([sign] * abs(times), NO_RESOURCES)
    assert times * one == one * times


@given(vectors, vectors, vectors)
def test_fits_is_a_partial_order_that_sums_keep(one, two, three):
    assert one.fits(one)
    assert one.fits(two) is (not one.lacking(two))
    if one.fits(two):
        assert (one + three).fits(two + three)
        if two.fits(one):
            assert one == two
        if two.fits(three):
            assert one.fits(three)


@given(vectors, vectors)
def test_the_order_is_total_and_equal_only_for_equal_vectors(one, two):
    assert (one < two) + (one == two) + (one > two) == 1


def test_the_text_names_what_there_is():
    whole = Resources(2500, 8, 16 * GIB, (("matlab", 2), ("scratch", 100 * GIB)))
    assert str(whole) == "2.5 GPUs, 8 CPUs, 16 GiB memory, 2 matlab, 100 GiB scratch"
    assert str(Resources(1000)) == "1 GPU"
    assert str(NO_RESOURCES) == "nothing"


def test_what_lacks_is_named():
    room = Resources(1000, 4, GIB, (("matlab", 1),))
    assert Resources(2000).lacking(room) == "GPUs"
    assert Resources(cpus=5).lacking(room) == "CPUs"
    assert Resources(memory_bytes=2 * GIB).lacking(room) == "memory"
    assert Resources(extras=(("matlab", 2),)).lacking(room) == "matlab"
    assert Resources(extras=(("nic", 1),)).lacking(room) == "nic"
