"""Jobs that leave their lines or go to others, many at once: what it costs, what it may not change, and that a fault leaves nobody behind."""

from dataclasses import replace

import pytest

from phalanx.core.fleet.node import Cordon
from phalanx.core.ids import NodeId, ReservationId
from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.board_records import JobEntry
from phalanx.core.scheduling.job_classes import JobClassRegistry
from phalanx.core.scheduling.policies import POLICIES, policy_named
from phalanx.core.work.reservation import Reservation
from phalanx.core.work.states import WaitReasonCode
from tests.builders import T, job, make_fleet
from tests.cell import Cell

IN_LINE = ["default", "fifo", "sjf", "skip", "fair", "backfill"]  # the others keep no line
SHUT = Cordon(by="op", why="disk", since_s=T, drain=False)


class Counted(float):
    """A submit time that counts how often it is compared."""

    compared = 0

    def __eq__(self, other):
        Counted.compared += 1
        return float(self) == float(other)

    def __lt__(self, other):
        Counted.compared += 1
        return float(self) < float(other)

    __hash__ = float.__hash__


def named(cell, letter):
    return [one for one in cell.world.jobs.values() if one.id.startswith(letter)]


@pytest.mark.parametrize("name", IN_LINE)
def test_many_that_change_lines_are_not_each_compared_with_all_the_others(name):
    """Found by reading: of ten thousand whose priority changed, each went through all the others: 8 s, and half a minute with `fifo`."""
    board = Board([8])
    policy = policy_named(name)()
    policy.attach(board)
    needs = (board.need_of(8),)
    first, second = board.job_class(needs), board.job_class(needs, rank=5)
    many = [JobEntry(seq=number, job_class=first, submit_s=Counted(number), size_s=100.0) for number in range(200)]
    for one in many:
        board.add_waiting(one)
    Counted.compared = 0
    board.change_classes([(one, second) for one in reversed(many)])
    assert Counted.compared < 40 * len(many)
    policy.decide(300.0)
    assert list(board.running) == [0]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_jobs_told_of_together_start_in_the_order_of_jobs_told_of_one_by_one(name):
    orders = []
    for together in (True, False):
        cell = Cell(make_fleet("r: n0=8"), name=name)

        def put(records, cell=cell, together=together):
            for some in [records] if together else [[one] for one in records]:
                cell.put(*some)

        cell.submit(job("x", gpus="8", time_limit_s=50.0), lasts_s=50.0)
        cell.go_on(61.0)
        for number in range(24):
            gpus, limit_s = str((4, 8, 1)[number % 3]), 100.0 + 37 * number % 5
            cell.submit(job(f"{'abcd'[number % 4]}{number}", gpus=gpus, time_limit_s=limit_s), lasts_s=100.0)
            cell.now_s += 1.0
        a, b, c = (named(cell, letter) for letter in "abc")
        put([replace(one, held=True) for one in a] + [replace(one, spec=replace(one.spec, priority=3)) for one in b])
        put([replace(one, held=False) for one in a] + [replace(one, held=True) for one in c])
        node = cell.world.nodes[NodeId("n0")]
        put([replace(node, cordon=SHUT), *c])
        assert {cell.why(one.id) for one in named(cell, "d")} == {WaitReasonCode.NO_NODES}
        put([node])
        cell.go_on(6000.0)
        orders.append([one.job_id for plan in cell.plans for one in plan.placements])
        assert len(set(orders[-1])) == 25
    assert orders[0] == orders[1]


def test_fault_while_lines_change_leaves_no_job_in_its_old_line(monkeypatch):
    """Found by reading: once a step had broken off there, a change of priority moved nobody until the next reservation began or ended."""
    window = Reservation(id=ReservationId("m"), nodes=(NodeId("n0"),), start_s=T - 10.0, end_s=T + 100.0)
    cell = Cell(make_fleet("r: n0=8 n1=8").set_aside(window), name="default")
    cell.submit(*(job(name, gpus="8") for name in ("x", "a", "b", "c")))
    cell.go_on(10.0)
    assert cell.place_of("x").startswith("n1")
    klass_of, asked = JobClassRegistry.class_of, []

    def broken(*args):
        asked.append(args)
        if len(asked) == 2:
            raise RuntimeError("a fault of ours")
        return klass_of(*args)

    cell.now_s = T + 101.0
    monkeypatch.setattr(JobClassRegistry, "class_of", broken)
    with pytest.raises(RuntimeError):
        cell.plan()
    monkeypatch.undo()
    cell.scheduler.stale = True  # as the controller does
    cell.go_on(10.0)
    assert cell.place_of("a").startswith("n0")
    late = named(cell, "c")[0]
    cell.put(replace(late, spec=replace(late.spec, priority=9)))
    assert cell.scheduler.entries[late.id].job_class.rank == 9
    cell.end("x")
    cell.go_on(10.0)
    assert (cell.runs("b"), cell.runs("c")) == (False, True)
    assert set(cell.scheduler.board.waiting.values()) == {cell.scheduler.entries[one.id] for one in named(cell, "b")}
