"""Found by thinking like the drill: words of a supervisor that is dead already, which come after those of its next life."""

from dataclasses import replace

import pytest

from phalanx.controller.supervisor_incarnations import (
    HeldByOtherMachine,
    RegistrationChallenged,
    SupervisorIncarnations,
    SupervisorReplaced,
)
from phalanx.core.ids import NodeId, SupervisorId
from phalanx.core.state.reports import NodeDied, SupervisorRegistered
from tests.builders import make_node
from tests.harness import Harness
from tests.simulated_node import JobBehaviour

N0, N1 = NodeId("n0"), NodeId("n1")
BEHAVIOUR = JobBehaviour(run_s=30.0)


def dies_and_comes_back(cluster):
    cluster.kill_node("n1")
    cluster.run(1.0)
    cluster.revive_node("n1")
    cluster.run(1.0)


def test_a_hello_of_an_earlier_life_takes_nothing_from_the_one_that_lives():
    cluster = Harness()
    before = cluster.registration_of(
        cluster.nodes[N1]
    )  # it lies in a socket's buffer, for as long as its node dies and comes back
    dies_and_comes_back(cluster)
    job = cluster.submit(gpus="3x4", behaviour=BEHAVIOUR)
    cluster.runs(job)
    cluster.handle_registration(N1, before)
    assert cluster.ends(job).epoch == 1


def test_nor_does_one_that_is_heard_in_the_same_step_as_that_of_the_next_life():
    cluster = Harness()
    before = cluster.registration_of(cluster.nodes[N1])
    after = replace(before, supervisor_id=SupervisorId("n1-life2"))
    refused = cluster.turn([after, before])[1]
    assert isinstance(refused, SupervisorReplaced)
    assert cluster.world.nodes[N1].supervisor_id == after.supervisor_id


def test_nor_does_that_of_a_life_that_ended_before_it_was_ever_heard():
    """The head never heard of it, so nobody replaced it: it is asked whether it lives, and cannot answer."""
    cluster = Harness()
    dies_and_comes_back(cluster)
    unheard = replace(
        cluster.registration_of(cluster.nodes[N1]), supervisor_id=SupervisorId("n1-unheard"), challenge=""
    )
    dies_and_comes_back(cluster)
    job = cluster.submit(gpus="3x4", behaviour=BEHAVIOUR)
    cluster.runs(job)
    for _ in range(2):
        answer, _ = cluster.handle_registration(N1, unheard)
        assert isinstance(answer, str)
    assert cluster.ends(job).epoch == 1


def test_nor_does_its_death_that_is_told_when_the_next_life_runs_jobs():
    """Found by reading: Ray's actors keep a death until a driver asks, and bring the next life up meanwhile."""
    cluster = Harness()
    cluster.engine_late_s = 6.0
    dies_and_comes_back(cluster)
    job = cluster.submit(gpus="3x4", behaviour=BEHAVIOUR)
    cluster.runs(job)
    assert cluster.nodes[N1].incarnation == 2
    cluster.run(6.0)
    dead = [event for event in cluster.committed_events if isinstance(event, NodeDied)]
    assert [one.supervisor_id for one in dead] == ["n1-life1"]
    assert cluster.ends(job).epoch == 1


# ---- the challenge ---------------------------------------------------------------------------------------------------


def says(lives, who, challenge, speaks="a"):
    """The challenge that it is answered; empty where it is heard."""
    known = replace(make_node("n1"), supervisor_id=speaks)
    try:
        lives.check(
            SupervisorRegistered(node=make_node("n1"), supervisor_id=SupervisorId(who), challenge=challenge), known
        )
    except RegistrationChallenged as asked:
        return asked.challenge
    return ""


def test_a_newcomer_is_heard_once_it_says_what_it_was_told():
    lives = SupervisorIncarnations()
    told = says(lives, "b", "")
    assert told
    assert says(lives, "b", "") == told, "the same hello again, as a slow network brings it"
    assert says(lives, "b", f"{told}0") == told
    assert says(lives, "b", told) == ""
    assert says(lives, "b", told) not in ("", told), "it counts once"


def test_what_one_newcomer_was_told_is_no_word_of_another_nor_of_itself_once_another_came():
    lives = SupervisorIncarnations()
    first = says(lives, "b", "")
    second = says(lives, "c", first)
    assert second not in ("", first)
    assert says(lives, "b", first) not in ("", first)
    assert says(lives, "c", second) not in ("", second), "the late b was asked since: c is asked again, and answers"


def test_what_another_head_told_is_no_word_here():
    """Found by reading: every head counted from 1, and a body on its way to one that died is sent again to the next."""
    told = says(SupervisorIncarnations("h1"), "b", "")
    assert says(SupervisorIncarnations("h2"), "b", told) not in ("", told)
    lives = SupervisorIncarnations("h2")
    says(lives, "b", "")
    assert says(lives, "b", told) not in ("", told)


@pytest.mark.parametrize(("challenge", "speaks"), [("", None), ("", "b"), (None, "a")])
def test_who_replaces_nobody_and_who_knows_of_no_challenge_is_heard_at_once(challenge, speaks):
    assert says(SupervisorIncarnations(), "b", challenge, speaks) == ""


# ---- two machines ----------------------------------------------------------------------------------------------------


def booted(cluster, name, boot):
    """The node says hello again, as a machine with this boot."""
    node = cluster.nodes[name]
    node.record = replace(node.record, boot_id=boot)
    node.calls.register()
    cluster.run(1.0)


def stranger(cluster, boot="b"):
    """A supervisor of another machine (or boot) that comes under the name of n1."""
    return replace(
        cluster.registration_of(cluster.nodes[N1]),
        supervisor_id=SupervisorId("n1-stranger"),
        challenge="",
        node=replace(cluster.nodes[N1].record, boot_id=boot, hostname="stranger"),
    )


def test_machine_that_comes_back_under_a_name_that_another_took_is_refused_while_that_one_renews():
    """Found by reading: gpu1 broke and was replaced by another server as gpu1; repaired and switched on, it took the name from the living one."""
    cluster = Harness()
    booted(cluster, N1, "a")
    job = cluster.submit(gpus="3x4", behaviour=BEHAVIOUR)
    cluster.runs(job)
    for _ in range(3):
        assert isinstance(cluster.turn([stranger(cluster)])[0], HeldByOtherMachine)
        cluster.run(3.0)
    cluster.kill_head()
    cluster.start_head()
    assert isinstance(cluster.turn([stranger(cluster)])[0], HeldByOtherMachine), "nobody was heard by this head yet"
    cluster.run(3.0)
    assert isinstance(cluster.turn([stranger(cluster)])[0], HeldByOtherMachine)
    assert cluster.ends(job).epoch == 1


def test_it_is_heard_once_the_other_is_silent_and_at_once_on_the_same_machine():
    cluster = Harness()
    booted(cluster, N1, "a")
    assert isinstance(cluster.turn([stranger(cluster, "a")])[0], RegistrationChallenged)
    cluster.nodes[N1].power_off()  # the power; nobody tells
    assert isinstance(cluster.turn([stranger(cluster)])[0], HeldByOtherMachine)
    cluster.run(cluster.lease_s + 2.0)
    asked = cluster.turn([stranger(cluster)])[0]
    assert isinstance(asked, RegistrationChallenged)
    assert cluster.turn([replace(stranger(cluster), challenge=asked.challenge)]) == [None]
    assert cluster.world.nodes[N1].hostname == "stranger"
