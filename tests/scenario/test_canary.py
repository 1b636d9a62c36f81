"""Rollouts by shares of the sessions, in virtual time: what gateways report, and what the head makes of it."""

import dataclasses

import pytest

from phalanx.core.ids import ServiceId, UserId
from phalanx.core.lifecycle.canary import ANSWERED_MIN, FEW_FACTOR
from phalanx.core.state.reports import LoadObserved
from phalanx.core.work.services.revision_figures import RevisionFigures
from phalanx.core.work.services.rollout_terms import WHOLE, RolloutTerms
from phalanx.core.work.services.service import ServiceState, rollback_revision
from phalanx.core.work.services.service_load import ServiceLoad
from tests.harness import Harness
from tests.scenario.test_services import (
    CRASHES,
    becomes,
    ready,
    replicas,
    scale,
    service,
    serving,
    stop,
    update,
    web,
)

WEB = ServiceId("web")
TERMS = RolloutTerms(first=50, last=500, step_s=30.0)
BLUE_GREEN = RolloutTerms(first=WHOLE, last=WHOLE, step_s=30.0)


@pytest.fixture
def cluster():
    return Harness("r: n0=4 n1=4 n2=4")


def canary(version, low=2, high=4, terms=TERMS):
    one = web(low, high, env=(("A", version),))
    return dataclasses.replace(one, service=dataclasses.replace(one.service, rollout=terms))


def report(cluster, new, stable, gateway="gateway-1", *, revision=2, before=1):
    revisions = {revision: RevisionFigures(**new), before: RevisionFigures(**stable)}
    return cluster.request(
        LoadObserved(user=UserId("opal"), gateway=gateway, loads=((WEB, ServiceLoad(revisions=revisions)),))
    )


def good(count):
    return {"begun": count, "answered": count, "first_tokens": {50: count}, "speeds": {110: count}}


def traffic(cluster, seconds, new=None, **more):
    """Requests of which the revisions get their shares; until the rollout ends."""
    for _ in range(seconds):
        found = service(cluster).canary
        if found is None:
            return
        own = round(200 * found.share / WHOLE)
        report(cluster, new or good(own), good(200 - own), **more)
        cluster.run(1.0)


def lines(cluster):
    return [line.text for line in cluster.store.history(limit=10_000) if line.kind == "service" and line.by == "canary"]


def test_the_share_grows_in_steps_and_the_replicas_with_it(cluster):
    ready(cluster, web(4, 4))
    update(cluster, canary("1", 4, 4))
    assert service(cluster).canary.share == 0
    cluster.until(lambda: service(cluster).canary.share)
    assert (len(serving(cluster, 1)), len(serving(cluster, 2))) == (4, 1)
    shares: dict[int, int] = {}
    while service(cluster).canary is not None and not service(cluster).canary.completing:
        traffic(cluster, 1)
        if service(cluster).canary is not None:
            shares.setdefault(service(cluster).canary.share, len(serving(cluster, 2)))
            assert len(serving(cluster, 1)) >= 4 or service(cluster).canary.completing, "the way back costs nothing"
    assert shares == {50: 1, 100: 1, 200: 1, 500: 2}, "share and replicas of the new revision, once it has the share"
    last = 500
    while (found := service(cluster).canary) is not None:
        assert found.share >= last, "no session goes back"
        last = found.share
        cluster.run(0.1)
    becomes(cluster, ServiceState.READY)
    assert (len(serving(cluster, 1)), len(serving(cluster, 2))) == (0, 4)
    assert service(cluster).served_revision == 2
    assert lines(cluster) == [
        "service web: revision 2 gets 5 % of the sessions",
        "service web: revision 2 gets 10 % of the sessions",
        "service web: revision 2 gets 20 % of the sessions",
        "service web: revision 2 gets 50 % of the sessions",
        lines(cluster)[-1],
    ]
    assert lines(cluster)[-1].startswith("service web: revision 2 replaces all of revision 1: 0 errors in ")


def begin(cluster, version="1", terms=TERMS):
    ready(cluster)
    update(cluster, canary(version, terms=terms))
    cluster.until(lambda: service(cluster).canary.share)


def test_a_revision_with_errors_goes_back_at_once_and_says_why(cluster):
    begin(cluster)
    old = serving(cluster, 1)
    traffic(cluster, 5)
    for _ in range(3):
        report(cluster, good(10) | {"errors": 1, "failing_sessions": 1}, good(190))
    found = service(cluster)
    assert found.revision == 1
    assert found.failure == (
        "revision 2 was sent back: 2.9 % errors of revision 2 against 0.0 % of revision 1 after 70 requests"
    )
    assert found.canary is None
    assert not [one for one in replicas(cluster) if one.replica.revision == 2]
    cluster.run(1.0)
    assert (service(cluster).state, service(cluster).canary, serving(cluster)) == (ServiceState.READY, None, old)
    assert lines(cluster)[-1] == f"service web: {found.failure}; back to revision 1"
    assert rollback_revision(service(cluster)) == 1


def test_errors_of_several_gateways_add_up(cluster):
    begin(cluster)
    for number in (1, 2, 3):
        report(cluster, good(5) | {"errors": 1, "failing_sessions": 1}, good(95), gateway=f"gateway-{number}")
    assert service(cluster).failure.startswith("revision 2 was sent back: 20.0 % errors of revision 2 against 0.0 %")


def test_the_same_errors_of_both_revisions_change_nothing(cluster):
    begin(cluster)
    for _ in range(60):
        report(
            cluster, good(10) | {"errors": 1, "failing_sessions": 1}, good(190) | {"errors": 19, "failing_sessions": 19}
        )
        cluster.run(0.1)
    assert service(cluster).revision == 2
    assert not service(cluster).failure


@pytest.mark.parametrize(
    ("worse", "why"),
    [
        ({"first_tokens": {70: 10}}, "first token of 9 of 10 streams"),
        ({"speeds": {100: 10}}, "9 of 10 answers with"),
        ({"first_tokens": {}, "unanswered": {90: 30}}, "and streams without any"),
    ],
    ids=["late", "slow", "hangs"],
)
def test_a_slower_revision_goes_back(cluster, worse, why):
    begin(cluster)
    traffic(cluster, 5)
    traffic(cluster, 20, good(10) | worse)
    assert why in service(cluster).failure
    assert service(cluster).revision == 1


def test_first_answers_of_new_replicas_are_no_evidence(cluster):
    begin(cluster)
    report(cluster, good(0), good(500))
    report(cluster, good(9) | {"first_tokens": {100: 9}}, good(191))
    traffic(cluster, 10)
    assert not service(cluster).failure


def test_without_requests_a_rollout_takes_longer(cluster):
    begin(cluster)
    began_s = cluster.clock.boot_s
    cluster.until(lambda: service(cluster).served_revision == 2, 1000.0)
    assert 4 * FEW_FACTOR * TERMS.step_s <= cluster.clock.boot_s - began_s < 4 * FEW_FACTOR * TERMS.step_s + 30
    assert "no request came to compare them" in lines(cluster)[-1]


def test_requests_that_are_not_answered_hold_the_share(cluster):
    begin(cluster)
    for _ in range(int(FEW_FACTOR * TERMS.step_s) + 30):
        report(cluster, {"begun": 1}, good(19))
        cluster.run(1.0)
    assert service(cluster).canary.share == 50
    traffic(cluster, ANSWERED_MIN)
    assert service(cluster).canary.share > 50


def test_a_head_that_starts_goes_on_with_share_and_evidence(cluster):
    begin(cluster)
    traffic(cluster, 45)
    assert service(cluster).canary.share == 100
    report(cluster, good(20) | {"errors": 2, "failing_sessions": 2}, good(180))
    assert service(cluster).revision == 2
    traffic(cluster, 11)
    cluster.kill_head()
    cluster.start_head()
    cluster.run(3.0)
    found = service(cluster).canary
    assert (found.share, found.errors) == (100, 2)
    assert len(serving(cluster, 2)) == 1
    report(cluster, good(20) | {"errors": 1, "failing_sessions": 1}, good(180))
    assert service(cluster).failure, "two errors from before and one more"


def test_one_command_goes_back_in_the_middle(cluster):
    begin(cluster)
    traffic(cluster, 40)
    update(cluster, revision=1)
    assert service(cluster).canary.share == 0
    cluster.until(lambda: service(cluster).canary is None)
    becomes(cluster, ServiceState.READY)
    assert not serving(cluster, 2)
    assert len(serving(cluster, 1)) == 2


def test_another_revision_in_the_middle_begins_again(cluster):
    begin(cluster)
    traffic(cluster, 40)
    update(cluster, canary("2"))
    found = service(cluster).canary
    assert (found.revision, found.stable, found.share) == (3, 1, 0)
    cluster.until(lambda: service(cluster).canary.share)
    assert not serving(cluster, 2)
    assert (len(serving(cluster, 1)), len(serving(cluster, 3))) == (2, 1)


def test_a_revision_whose_replicas_crash_goes_back(cluster):
    ready(cluster)
    update(cluster, canary("1"), behaviour=CRASHES)
    cluster.until(lambda: service(cluster).failure)
    assert "failed 3 times" in service(cluster).failure
    cluster.until(lambda: service(cluster).canary is None)
    assert len(serving(cluster, 1)) == 2


def test_replicas_cancelled_or_added_meanwhile(cluster):
    begin(cluster)
    scale(cluster, 3)
    cluster.until(lambda: len(serving(cluster, 1)) == 2 and len(serving(cluster, 2)) == 1)
    scale(cluster, 4)
    cluster.until(lambda: len(serving(cluster)) == 4)
    assert len(serving(cluster, 1)) == 3, "replicas of the stable revision start during the rollout"
    scale(cluster, 0)
    cluster.until(lambda: not replicas(cluster))
    assert service(cluster).state is ServiceState.SLEEPING
    scale(cluster, 2)
    becomes(cluster, ServiceState.UPDATING)
    cluster.until(lambda: len(serving(cluster)) >= 2)
    stop(cluster)
    cluster.until(lambda: not replicas(cluster))
    assert service(cluster).canary is None


def test_without_room_one_old_replica_makes_room():
    cluster = Harness("r: n0=1 n1=1")
    ready(cluster, web(2, 2))
    update(cluster, canary("1", 2, 2))
    cluster.until(lambda: service(cluster).canary.share)
    assert (len(serving(cluster, 1)), len(serving(cluster, 2))) == (1, 1)
    cluster.run(20.0)
    assert len(serving(cluster)) == 2


def test_blue_green_shifts_all_sessions_at_once_and_keeps_the_old_replicas_for_a_step(cluster):
    ready(cluster, web(3, 3))
    update(cluster, canary("1", 3, 3, BLUE_GREEN))
    for _ in cluster.events(lambda: not service(cluster).canary.share):
        assert service(cluster).canary.share == 0
    assert (service(cluster).canary.share, len(serving(cluster, 2)), len(serving(cluster, 1))) == (WHOLE, 3, 3)
    cluster.run(28.0)
    assert len(serving(cluster, 1)) == 3
    cluster.until(lambda: service(cluster).served_revision == 2, 10.0)
    becomes(cluster, ServiceState.READY)
    assert not serving(cluster, 1)


def test_the_first_revision_and_a_return_have_no_steps(cluster):
    ready(cluster, canary("0"))
    assert service(cluster).canary is None
    update(cluster, canary("1"))
    cluster.until(lambda: service(cluster).canary.share)
    while service(cluster).canary is not None:
        traffic(cluster, 5)
    becomes(cluster, ServiceState.READY)
    update(cluster, revision=1)
    assert service(cluster).canary is None
    becomes(cluster, ServiceState.READY)
    assert len(serving(cluster, 1)) == 2
