"""The quick `replace`: what `dataclasses.replace` gives, field by field."""

import dataclasses

import pytest

from phalanx.core.ids import NodeId
from phalanx.core.state.fast_replace import replace
from phalanx.core.work.attempt import Member, MemberState
from phalanx.core.work.states import JobState
from tests.builders import job

MEMBER = Member(node_id=NodeId("n0"))


def test_it_gives_what_the_standard_library_gives():
    before = job("a", gpus=16)
    after = replace(before, state=JobState.RUNNING, detail="x", held=True)
    assert after == dataclasses.replace(before, state=JobState.RUNNING, detail="x", held=True)
    assert before.state is JobState.PENDING
    assert hash(replace(MEMBER, why="x")) == hash(Member(node_id=NodeId("n0"), why="x"))
    assert replace(MEMBER, state=MemberState.READY).state is MemberState.READY


def test_unknown_field_is_refused():
    with pytest.raises(AttributeError):
        replace(MEMBER, colour="red")  # type: ignore[call-arg]  # that is the point
