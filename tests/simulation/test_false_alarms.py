"""Alarms of the drill that no fault of the code had raised, and what it has to see nevertheless."""

from dataclasses import replace
from random import Random

import pytest

from phalanx.core.fleet.node import Cordon, NodeState
from phalanx.core.ids import NodeId, UserId
from phalanx.core.work.states import AttemptState
from phalanx.simulator.drill.violations import InvariantBroken
from phalanx.simulator.drill.workload import UserSimulator
from tests.builders import make_node
from tests.harness import Harness
from tests.simulated_node import JobBehaviour

N1 = NodeId("n1")
SHUT = Cordon(by=UserId("op"), why="disk", since_s=1.0, drain=True)
DRAINED = replace(make_node("n1"), cordon=SHUT)
DOWN = replace(DRAINED, state=NodeState.DOWN, failure_count=1)


def test_a_rank_that_neither_freezes_nor_dies_hangs_in_the_kernel_and_executes_nothing_past_the_lease():
    """Seed 103655957649."""
    cluster = Harness(lease_s=6.0)
    job = cluster.submit(gpus="3x4", behaviour=JobBehaviour(run_s=60.0))
    cluster.runs(job)
    node = cluster.nodes[N1]
    node.unfreezable = node.processes.unkillable = node.cut = True
    cluster.run(12.0)
    assert node.tasks, "they are still there"
    assert node.executing_tasks() == []
    assert cluster.attempts(job)[0].state is AttemptState.ENDED


def test_one_that_does_not_freeze_and_is_not_told_to_die_executes():
    cluster = Harness()
    cluster.runs(cluster.submit(gpus="3x4", behaviour=JobBehaviour(run_s=60.0)))
    node = cluster.nodes[N1]
    node.unfreezable = node.processes.unkillable = True
    assert node.executing_tasks()


class Answered(UserSimulator):
    """Asked for a drain twice, the head answers this."""

    def __init__(self, *answers):
        super().__init__(Harness(), Random(0))
        self.answers = list(answers)

    def _ask(self, event):
        return self.answers.pop(0) if self.answers else None


@pytest.mark.parametrize("again", [DRAINED, DOWN])
def test_a_node_that_goes_down_between_two_drains_was_changed_by_none(again):
    """Seed 1020449195241: its lease ended in the step in which the second was heard."""
    Answered(DRAINED, again).cordon()


@pytest.mark.parametrize(
    "again",
    [
        replace(DRAINED, cordon=replace(SHUT, since_s=2.0)),
        replace(DOWN, cordon=replace(SHUT, since_s=2.0)),
        replace(DRAINED, changed_s=9.0),
    ],
)
def test_what_a_second_drain_changes_is_seen(again):
    with pytest.raises(InvariantBroken, match="a second drain"):
        Answered(DRAINED, again).cordon()
