"""Caps on the power of GPUs: what the head refuses, sends to supervisors, and makes of their answers."""

from dataclasses import replace

import pytest

from phalanx.core.errors import BadRequest, Conflict, NotFound
from phalanx.core.fleet.power_limits import PowerLimits, parse_power_mw
from phalanx.core.ids import NodeId, UserId
from phalanx.core.state.commands import LimitPower
from phalanx.core.state.events import CapPower, CordonNode, RestorePower
from phalanx.core.state.reports import PowerLimited, SupervisorRegistered
from phalanx.simulator.drill.cluster import DrillCluster
from tests.builders import make_node

N0, OP = NodeId("n0"), UserId("op")


def limits(limit_w=700, original_w=None, *, low_w=200):
    return tuple(
        PowerLimits(
            index=index,
            min_mw=(low_w + 50 * index) * 1000,
            max_mw=700_000,
            default_mw=700_000,
            limit_mw=limit_w * 1000,
            original_mw=None if original_w is None else original_w * 1000,
        )
        for index in range(2)
    )


class Fleet:
    """A node with two GPUs, whose supervisor the test plays; and one without power limits."""

    def __init__(self):
        first = replace(make_node("n0", 2), power_limits=limits())
        self.cluster = DrillCluster([first, make_node("n1", 2)])
        self.cluster.run(1.0)

    def cap(self, watts=300, node=N0, for_s=None):
        until_s = None if for_s is None else self.cluster.now.wall_s + for_s
        return self.cluster.request(CapPower(node_id=node, by=OP, milliwatts=watts * 1000, until_s=until_s))

    def reports(self, watts, found, why=""):
        milliwatts = None if watts is None else watts * 1000
        self.cluster.turn([PowerLimited(node_id=N0, milliwatts=milliwatts, limits=found, why=why)])

    def registers_again(self, found):
        hello = self.cluster.registration_of(self.cluster.nodes[N0])
        self.cluster.turn([replace(hello, node=replace(hello.node, power_limits=found))])

    def sent(self):
        """The limits of the commands since the last call, in watts."""
        found = [one for one in self.cluster.commands if isinstance(one, LimitPower)]
        self.cluster.commands.clear()
        return [None if one.milliwatts is None else one.milliwatts // 1000 for one in found]

    @property
    def node(self):
        return self.cluster.world.nodes[N0]

    def kinds(self):
        return [line.kind for line in self.cluster.store.history(node_id=N0, limit=100) if "power" in line.kind]


@pytest.fixture
def fleet():
    return Fleet()


def test_cap_is_sent_and_holds_once_the_supervisor_answers(fleet):
    fleet.cap()
    assert fleet.sent() == [300]
    assert not fleet.node.power_cap.applied
    fleet.reports(300, limits(300, 700))
    assert fleet.node.power_cap.applied
    assert [one.limit_mw for one in fleet.node.power_limits] == [300_000, 300_000]
    fleet.cluster.request(RestorePower(node_id=N0, by=OP))
    assert fleet.sent() == [None]
    fleet.reports(None, limits(700))
    assert fleet.node.power_cap is None
    assert fleet.kinds() == ["power_cap", "power_limit_set", "power_cap_ended", "power_limit_restored"]


@pytest.mark.parametrize("watts", [249, 701])
def test_limit_that_one_of_the_gpus_does_not_allow_is_refused_with_the_range(fleet, watts):
    with pytest.raises(BadRequest, match=f"{watts} W is out of range; its GPUs allow 250 W to 700 W"):
        fleet.cap(watts)
    assert fleet.sent() == []


def test_nodes_that_cannot_be_capped_are_refused(fleet):
    with pytest.raises(NotFound):
        fleet.cap(node=NodeId("n9"))
    with pytest.raises(Conflict, match="no power limits to set"):
        fleet.cap(node=NodeId("n1"))
    fleet.cluster.kill_node("n0")
    fleet.cluster.run(5.0)
    with pytest.raises(Conflict, match="down"):
        fleet.cap()


def test_drained_node_can_be_capped(fleet):
    fleet.cluster.request(CordonNode(node_id=N0, by=OP, why="fans", drain=True))
    assert fleet.cap().power_cap is not None


def test_supervisor_that_starts_again_is_told_which_cap_holds(fleet):
    fleet.cap(for_s=100.0)
    fleet.reports(300, limits(300, 700))
    fleet.sent()
    fleet.registers_again(limits(700))
    assert fleet.sent() == [300], "a reboot has reset it"
    fleet.cluster.run(200.0)
    fleet.registers_again(limits(300, 700))
    assert fleet.sent() == [None], "its time is over"
    assert fleet.node.power_cap is None


def test_cap_that_expires_is_gone_once_the_supervisor_has_restored_the_limits(fleet):
    fleet.cap(for_s=100.0)
    fleet.reports(300, limits(300, 700))
    fleet.cluster.run(101.0)
    fleet.reports(None, limits(700))
    assert fleet.node.power_cap is None


def test_restore_wins_over_a_cap_that_is_still_under_way(fleet):
    fleet.cap()
    fleet.cluster.request(RestorePower(node_id=N0, by=OP))
    fleet.sent()
    fleet.reports(300, limits(300, 700))
    assert fleet.sent() == [None]


def test_failure_is_shown_and_ends_the_cap(fleet):
    fleet.cap()
    fleet.reports(300, limits(700), why="only root may change the power limit of GPU 0")
    assert fleet.node.power_cap is None
    assert "only root" in fleet.node.power_error
    fleet.cap(400)
    assert fleet.node.power_error == ""


def test_supervisor_that_reports_nonsense_is_refused(fleet):
    hello = fleet.cluster.registration_of(fleet.cluster.nodes[N0])
    wrong = replace(limits()[0], limit_mw=-1)
    fleet.reports(300, (wrong,))
    assert fleet.node.power_limits == limits()
    assert "power" in replace(hello.node, power_limits=(wrong,)).invalid_count()
    assert isinstance(hello, SupervisorRegistered)


@pytest.mark.parametrize(
    ("text", "milliwatts"), [("300W", 300_000), ("300", 300_000), ("0.3kW", 300_000), ("287.5 w", 287_500)]
)
def test_power_in_words(text, milliwatts):
    assert parse_power_mw(text) == milliwatts


@pytest.mark.parametrize("text", ["", "0", "-5", "W", "300V", "1e9", "3000000000", "0.0001"])
def test_what_is_no_power(text):
    with pytest.raises(BadRequest, match="not a power limit"):
        parse_power_mw(text)
