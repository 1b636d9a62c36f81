"""Host lists, from people who type and from people who mean harm."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.hostlist import expand_hostlist, fold_hostlist


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n0", "n0"),
        ("n0,n1", "n0 n1"),
        (" n0 , n1 ,", "n0 n1"),
        ("gpu[001-004,007]", "gpu001 gpu002 gpu003 gpu004 gpu007"),
        ("gpu[9-11]", "gpu9 gpu10 gpu11"),
        ("r1-gpu[1-2].lab,n0", "r1-gpu1.lab r1-gpu2.lab n0"),
        ("n1,n[0-2]", "n1 n0 n2"),
        ("[1-2]", "1 2"),
        ("a[ 1 , 2-3 ]", "a1 a2 a3"),
    ],
)
def test_names_come_in_the_order_written_without_doubles(text, names):
    assert expand_hostlist(text) == tuple(names.split())


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "gpu[",
        "gpu]",
        "]a[",
        "gpu[1-2",
        "gpu[[1]]",
        "gpu[]",
        "gpu[a-b]",
        "gpu[1-]",
        "gpu[-1]",
        "gpu[2-1]",
        "a[1]b[2]",
        "gpu[1,,2]",
        "gpu[²]",
        "gpu[٣]",
        "gpu[1-²]",
        "n[0-999999999]",
        "n[0-99999],m[0-99999]",
        "n[" + "9" * 5000 + "]",
        "n[" + "0" * 5000 + "1-2]",
        "n[" + ",".join(["0-99999"] * 1000) + "]",
        "n," * 600_000,
        "n[" + "[" * 100_000,
    ],
    ids=lambda text: repr(text)[:24],
)
def test_hostile_and_mistyped_lists_are_refused_shortly(text):
    with pytest.raises(BadRequest) as refused:
        expand_hostlist(text)
    assert len(refused.value.message) < 300


def test_largest_list_is_taken():
    assert len(expand_hostlist("n[0-99999]")) == 100_000


@given(st.sets(st.from_regex(r"[a-z]{0,3}-?[a-z][0-9]{0,4}", fullmatch=True), min_size=1))
def test_folded_names_expand_to_themselves(names):
    assert set(expand_hostlist(fold_hostlist(sorted(names)))) == names


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("gpu001 gpu002 gpu003 gpu007", "gpu[001-003,007]"),
        ("n0", "n0"),
        ("n9 n10", "n9,n10"),
        ("head n1 n2", "head,n[1-2]"),
        ("", ""),
    ],
)
def test_fold_writes_ranges(names, text):
    assert fold_hostlist(names.split()) == text
