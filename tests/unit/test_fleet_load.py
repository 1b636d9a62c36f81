"""What a fleet asks of one head, computed from what one request costs."""

import pytest

from benchmarks.fleet_load import RequestCosts, fleet_needs
from phalanx.controller.leases import RENEWALS_PER_S_MAX
from phalanx.node.probes.sampling import BUSY_S, IDLE_S, report_every_s

COSTS = RequestCosts(renewal_s=0.0005, sample_s=0.0004, poll_s=0.0006, supervisor_bytes=1000.0)


def test_a_small_fleet_renews_four_times_a_lease_and_samples_each_second():
    told = fleet_needs(100, COSTS, busy=True)
    assert (told.lease_s, told.renew_s, told.lost_s) == (6.0, 1.5, 7.0)
    assert told.samples_per_s == 100 / BUSY_S
    assert told.cores == pytest.approx(100 / 1.5 * 0.0005 + 100 * 0.0004 + 5 * 0.0006)
    assert told.memory_bytes == 100_000.0


def test_renewals_and_samples_of_a_large_fleet_stay_the_same_and_its_lease_grows():
    small, large = fleet_needs(1_000, COSTS, busy=True), fleet_needs(10_000, COSTS, busy=True)
    for told in (small, large):
        assert told.renewals_per_s == pytest.approx(RENEWALS_PER_S_MAX)
        assert told.samples_per_s <= RENEWALS_PER_S_MAX
    assert large.lease_s == pytest.approx(10 * small.lease_s)


@pytest.mark.parametrize(
    ("renew_in_s", "busy", "every_s"),
    [(1.5, True, BUSY_S), (1.5, False, IDLE_S), (2.5, True, 2.5), (2.5, False, IDLE_S), (25.0, False, 25.0)],
)
def test_samples_come_no_more_often_than_renewals_once_the_fleet_is_large(renew_in_s, busy, every_s):
    assert report_every_s(renew_in_s, busy=busy) == every_s
