"""Who held up a gang that hung. Ranks are drawn as `state place step`, a place with `*` waits in a collective."""

from dataclasses import replace

import pytest

from phalanx.core.lifecycle.hang_culprits import explain_hang, find_culprits
from phalanx.core.work.failure import FailureEvidence, StuckPosition
from tests.builders import exited


def gang(*ranks):
    exits = []
    for rank, drawn in enumerate(ranks):
        exit = exited(rank, f"n{rank // 2}", signal=9, by_us=True)
        if drawn is not None:
            state, place, step = drawn.split()
            position = StuckPosition(
                state=state,
                frame=place.strip("*-"),
                in_collective="*" in place,
                step=None if step == "-" else int(step),
            )
            exit = replace(exit, evidence=FailureEvidence(stuck_position=position))
        exits.append(exit)
    return exits


W = "S reduce* 7"
DRAWN = [
    ((W, "S sleep 7", W, W), [1], "is not in the collective in which 3 wait: sleep"),
    ((W, W, "T - 7", W), [2], "stopped by a signal: state T"),
    (
        ("S sleep 7", "T - 7", W, W),
        [1],
        "stopped by a signal: state T",
    ),  # a stopped one cannot go on whatever the others do
    (("D read 7", W, W, W), [0], "waits in the kernel: read"),
    (("S a 6", "S a 7", "S a 7", "S a 7"), [0], "made the fewest steps: a"),
    (("S a 7", "S a 7", "S b 7", "S a 7"), [2], "is not where 3 others are: b"),
    (("S a 7", "S b 7", "S c 7", "S d 7"), [], "the ranks are in different places"),
    ((W, W, W, W), [], "all ranks are in the same place: reduce"),
    (("T - 7", "T - 7"), [], "all ranks are in the same place: state T"),
    (("S sleep 7", W), [0], "is not in the collective in which 1 wait: sleep"),
    (("S sleep 7",), [0], "sleep"),
    ((None, None), [], "no stack could be taken"),
    ((W, None, "S sleep -", W), [2], "is not in the collective in which 2 wait: sleep"),
]


@pytest.mark.parametrize(("ranks", "named", "why"), DRAWN)
def test_culprit(ranks, named, why):
    found, said = find_culprits(gang(*ranks))
    assert [exit.rank for exit in found] == named
    assert said == why


def test_sentence_names_rank_and_node_and_bounds_the_names():
    assert explain_hang(gang(W, W, W, "S sleep 7")) == "rank 3 on n1: is not in the collective in which 3 wait: sleep"
    assert explain_hang(gang(*[W] * 4, *["S sleep 7"] * 5)).startswith(
        "rank 4 on n2, rank 5 on n2, rank 6 on n3 and 2 more: is not"
    )
    assert explain_hang(gang(W, W)).startswith("the rank that caused it is unknown")
