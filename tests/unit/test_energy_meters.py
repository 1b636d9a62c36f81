"""The meters of a node: the device's counter, and power added up where there is none."""

from phalanx.core.ids import SupervisorId
from phalanx.node.logic.energy_meters import EnergyMeters, EnergySample
from phalanx.node.logic.lease import NS_PER_S


def sample(*, energy_mj=None, power_w=None):
    return [EnergySample(index=0, uuid="GPU-a", energy_mj=energy_mj, power_w=power_w)]


def read(meters, at_s, **shown):
    return meters.read(sample(**shown), round(at_s * NS_PER_S))


def test_counter_of_the_device_is_read_as_it_is():
    (found,) = read(EnergyMeters(SupervisorId("s")), 5.0, energy_mj=123_456, power_w=300.0)
    assert (found.meter, found.millijoules, found.integrated) == ("GPU-a", 123_456, False)


def test_power_is_added_up_where_there_is_no_counter():
    meters = EnergyMeters(SupervisorId("s"))
    found = [
        read(meters, at_s, power_w=power_w)[0] for at_s, power_w in ((0, 100.0), (1, 300.0), (3, 300.0), (3.5, 0.0))
    ]
    assert [one.millijoules for one in found] == [0, 200_000, 800_000, 875_000]
    assert all(one.integrated for one in found)
    assert len({one.meter for one in found}) == 1


def test_power_that_nobody_saw_is_not_invented():
    meters = EnergyMeters(SupervisorId("s"))
    first = read(meters, 0, power_w=100.0)[0]
    later = read(meters, 60, power_w=100.0)[0]
    assert first.meter != later.meter, "the two cannot be subtracted"
    assert read(meters, 61, power_w=100.0)[0].millijoules == 100_000


def test_another_supervisor_has_other_integrals():
    meters = [EnergyMeters(SupervisorId(name)) for name in "ab"]
    assert len({read(one, 0, power_w=100.0)[0].meter for one in meters}) == 2


def test_counter_that_fails_once_is_not_replaced_by_its_power():
    meters = EnergyMeters(SupervisorId("s"))
    read(meters, 0, energy_mj=5, power_w=100.0)
    assert read(meters, 1, power_w=100.0) == []


def test_virtual_device_shows_nothing():
    assert read(EnergyMeters(SupervisorId("s")), 0) == []
