"""Services whose number of replicas follows their load, in virtual time: what gateways report, and what the head makes of it."""

from dataclasses import replace

import pytest

from phalanx.controller.services.load_scaler import GATEWAYS_MAX
from phalanx.core.errors import BadRequest, TryLater
from phalanx.core.ids import ServiceId, UserId
from phalanx.core.state.events import ScaleService, SleepReplicas
from phalanx.core.state.reports import LoadObserved
from phalanx.core.work.services.scale_terms import ScaleTerms
from phalanx.core.work.services.service import ServiceState
from phalanx.core.work.services.service_load import ServiceLoad
from phalanx.ports.store import StoreRefused
from tests.harness import Harness
from tests.scenario.test_services import SERVES, becomes, replicas, scale, service, serving, stop, submit, update, web

WEB = ServiceId("web")
TERMS = ScaleTerms(queue_s=2.0, in_flight=4, idle_s=30.0)


@pytest.fixture
def cluster():
    return Harness("r: n0=2 n1=2 n2=2")


def scaled(low=0, high=4, terms=TERMS, **fields):
    one = web(low, high, **fields)
    return replace(one, service=replace(one.service, scale=terms))


def report(cluster, gateway="gateway-1", user="opal", **load):
    return cluster.request(LoadObserved(user=UserId(user), gateway=gateway, loads=((WEB, ServiceLoad(**load)),)))


def reports(cluster, seconds, gateway="gateway-1", **load):
    for _ in range(seconds):
        report(cluster, gateway, **load)
        cluster.run(1.0)


def lines(cluster):
    return [line.text for line in cluster.store.history(limit=10_000) if line.kind == "service" and line.by == "load"]


def test_up_to_the_range_and_down_to_zero(cluster):
    submit(cluster, scaled())
    cluster.run(2.0)
    assert not replicas(cluster)
    report(cluster, waiting=1)
    assert len(replicas(cluster)) == 1, "in the step of the report"
    becomes(cluster, ServiceState.READY)
    reports(cluster, 5, in_flight=9)
    assert len(serving(cluster)) == 3
    reports(cluster, 5, in_flight=100)
    assert len(serving(cluster)) == 4, "the range ends there"
    reports(cluster, 29)
    assert len(serving(cluster)) == 4
    reports(cluster, 3)
    assert service(cluster).state is ServiceState.SLEEPING
    assert not serving(cluster)
    assert lines(cluster) == [
        "service web: 0 -> 1 replicas: a request waits for the first replica",
        "service web: 1 -> 3 replicas: 9 requests, 4 for each replica",
        "service web: 3 -> 4 replicas: 100 requests, 4 for each replica",
        "service web: 4 -> 0 replicas: no request for 30s",
    ]
    report(cluster, waiting=1)
    becomes(cluster, ServiceState.READY)


def test_down_only_after_ten_minutes_and_not_below_the_range(cluster):
    submit(cluster, scaled(1))
    becomes(cluster, ServiceState.READY)
    reports(cluster, 3, in_flight=12)
    assert len(serving(cluster)) == 3
    for _ in range(118):
        report(cluster, in_flight=2)
        cluster.run(5.0)
    assert len(serving(cluster)) == 3
    reports(cluster, 15, in_flight=2)
    assert len(serving(cluster)) == 1
    assert lines(cluster)[-1] == "service web: 3 -> 1 replicas: at most 1 needed within 10m00s"
    reports(cluster, 60)
    assert len(serving(cluster)) == 1, "its range begins at 1"


def test_gateways_add_up_and_a_dead_one_expires(cluster):
    submit(cluster, scaled(1))
    becomes(cluster, ServiceState.READY)
    for _ in range(3):
        report(cluster, "gateway-1", in_flight=4)
        report(cluster, "gateway-2", in_flight=5)
        cluster.run(1.0)
    assert service(cluster).load_replicas == 3
    load = cluster.head.controller.load_scaler.load_of
    found = load(WEB, cluster.clock.boot_s)
    assert (found.load.in_flight, found.gateways, found.needed) == (9, 2, 3)
    reports(cluster, 7, "gateway-2", in_flight=5)
    assert load(WEB, cluster.clock.boot_s).load.in_flight == 5
    cluster.run(6.0)
    assert load(WEB, cluster.clock.boot_s) is None
    assert service(cluster).load_replicas == 3, "without figures the number stays"


def test_only_so_many_gateways_count(cluster):
    submit(cluster, scaled())
    for number in range(GATEWAYS_MAX):
        report(cluster, f"gateway-{number}")
    report(cluster, "gateway-3")
    with pytest.raises(TryLater):
        report(cluster, "another")
    report(cluster, "another", user="ada")
    cluster.run(6.0)
    report(cluster, "another")


def test_a_head_that_starts_keeps_the_number(cluster):
    submit(cluster, scaled())
    report(cluster, in_flight=12)
    becomes(cluster, ServiceState.READY)
    cluster.kill_head()
    cluster.start_head()
    cluster.run(5.0)
    assert len(serving(cluster)) == 3
    cluster.run(5.0)
    for _ in range(118):
        report(cluster, in_flight=4)
        cluster.run(5.0)
    assert len(serving(cluster)) == 3, "it has no ten minutes of figures yet"
    reports(cluster, 15, in_flight=4)
    assert len(serving(cluster)) == 1, "it has seen no wait, and 4 in flight are those of one replica"


def test_a_users_number_is_the_least_until_auto(cluster):
    submit(cluster, scaled())
    scale(cluster, 2)
    becomes(cluster, ServiceState.READY)
    reports(cluster, 40)
    assert len(serving(cluster)) == 2, "no request, and yet it does not go to zero"
    reports(cluster, 4, in_flight=11)
    assert len(serving(cluster)) == 3, "load may ask for more"
    cluster.request(ScaleService(service_id=WEB, replicas=None, by=UserId("ada")))
    reports(cluster, 40)
    assert not serving(cluster)
    with pytest.raises(BadRequest, match=r"replicas: 0\.\.4; 5 is outside"):
        scale(cluster, 5)


def test_zero_by_hand_ends_with_the_next_request(cluster):
    submit(cluster, scaled(2))
    becomes(cluster, ServiceState.READY)
    scale(cluster, 0)
    reports(cluster, 30)
    assert service(cluster).state is ServiceState.SLEEPING
    assert not replicas(cluster)
    reports(cluster, 4, waiting=1)
    assert len(serving(cluster)) == 2, "its range begins at 2"


def test_auto_needs_targets(cluster):
    submit(cluster, web())
    with pytest.raises(BadRequest, match="has no scale"):
        cluster.request(ScaleService(service_id=WEB, replicas=None, by=UserId("ada")))
    report(cluster, waiting=50, oldest_wait_s=90.0)
    assert service(cluster).load_replicas is None, "figures of such a service change nothing"


def test_a_revision_without_targets_takes_the_lower_bound_again(cluster):
    submit(cluster, scaled(1))
    reports(cluster, 5, in_flight=12)
    assert service(cluster).desired == 3
    update(cluster, web(1, 4), behaviour=SERVES)
    becomes(cluster, ServiceState.UPDATING)
    becomes(cluster, ServiceState.READY)
    assert service(cluster).desired == 1


def test_one_replica_falls_asleep_instead_of_ending(cluster):
    one = scaled()
    submit(cluster, replace(one, service=replace(one.service, sleep="/sleep", wake="/wake")))
    reports(cluster, 6, in_flight=12)
    assert len(serving(cluster)) == 3
    reports(cluster, 45)
    found = service(cluster)
    assert (found.desired, found.asleep, found.state) == (1, 1, ServiceState.SLEEPING)
    assert len(replicas(cluster)) == 1
    reports(cluster, 10, waiting=1)
    found = service(cluster)
    assert (found.desired, found.asleep, len(serving(cluster))) == (1, 0, 1), "the same one woke"
    reports(cluster, 10, in_flight=12)
    assert len(serving(cluster)) == 3
    cluster.request(SleepReplicas(service_id=WEB, by=UserId("ada"), asleep=3))
    reports(cluster, 10, waiting=2)
    assert len(serving(cluster)) == 1, "load wakes what a user let sleep"


def test_a_stopped_service_is_forgotten(cluster):
    submit(cluster, scaled())
    reports(cluster, 3, waiting=1)
    stop(cluster)
    reports(cluster, 3, waiting=1)
    assert cluster.head.controller.load_scaler.load_of(WEB, cluster.clock.boot_s) is None
    assert not serving(cluster)
    assert (
        cluster.request(
            LoadObserved(user=UserId("opal"), gateway="gateway-1", loads=((ServiceId("nosuch"), ServiceLoad()),))
        )
        is None
    )


def test_a_refused_commit_only_delays(cluster):
    submit(cluster, scaled())
    cluster.run(1.0)
    cluster.store.full_commits = 1
    with pytest.raises(StoreRefused):
        report(cluster, waiting=1)
    assert not replicas(cluster)
    reports(cluster, 3, waiting=1)
    assert len(replicas(cluster)) == 1
