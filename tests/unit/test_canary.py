"""Rollouts by shares of the sessions: their terms, the sequential tests, and how a gateway divides and counts sessions."""

import itertools
import json
import math
from random import Random

import pytest

from phalanx.core.lifecycle import canary_tests
from phalanx.core.lifecycle.canary_tests import ERRORS, FALSE_ALARMS, FIRST_TOKENS, SPEEDS
from phalanx.core.work.job_file.keys import InvalidKey
from phalanx.core.work.services.canary import Canary, Evidence
from phalanx.core.work.services.log_histogram import class_of
from phalanx.core.work.services.rollout_terms import RolloutTerms, parse_rollout_terms, share_after
from phalanx.gateway.canary_sessions import INCIDENT_S, RevisionMeter, session_of
from phalanx.wire.api.services import CanaryShare

# ---- the key `update` -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shares", "step_s"),
    [
        ({"canary": "5%..50%"}, (50, 100, 200, 500), 30.0),
        ({"canary": "5..50%", "step": "5m"}, (50, 100, 200, 500), 300.0),
        ({"canary": " 10 % "}, (100,), 30.0),
        ({"canary": "0.1% .. 1%"}, (1, 2, 4, 10), 30.0),
        ({"canary": "30%..50%"}, (300, 500), 30.0),
        (["canary=5%..20%", "step=90s"], (50, 100, 200), 90.0),
        ("blue-green", (1000,), 30.0),
        ({"blue-green": "on", "step": "1h"}, (1000,), 3600.0),
    ],
)
def test_steps_of_a_rollout(text, shares, step_s):
    found = parse_rollout_terms(text)
    assert found is not None
    assert (found.shares, found.step_s) == (shares, step_s)
    assert parse_rollout_terms(found.keys()) == found
    assert [share_after(found, one) for one in (0, *shares)] == [*shares, None]
    assert all(one < following for one, following in itertools.pairwise(shares))


def test_rolling_is_what_happens_without_the_key():
    assert parse_rollout_terms("rolling") is None


@pytest.mark.parametrize(
    "text",
    [
        "canary",
        "fast",
        {},
        {"canary": "5"},
        {"canary": "0%"},
        {"canary": "51%"},
        {"canary": "50%..5%"},
        {"canary": "5%..101%"},
        {"canary": "-5%"},
        {"canary": "5%..."},
        {"canary": "٥%"},
        {"canary": "1e1%"},
        {"canary": "0.01%"},
        {"canary": "5%", "blue-green": "on"},
        {"blue-green": "off"},
        {"canary": "5%", "step": "1s"},
        {"canary": "5%", "step": "2d"},
        {"canary": "5%", "step": "soon"},
        {"canary": "5%", "steps": "3"},
        {"canary": None},
        {"step": "30s"},
        [],
        7,
    ],
)
def test_terms_that_are_refused(text):
    with pytest.raises(InvalidKey) as refused:
        parse_rollout_terms(text)
    assert refused.value.key == "update"
    assert refused.value.hint


@pytest.mark.parametrize(
    ("share", "awake", "replicas"), [(50, 1, 1), (50, 4, 1), (500, 4, 2), (500, 3, 2), (1000, 3, 3), (200, 0, 0)]
)
def test_replicas_that_a_share_needs(share, awake, replicas):
    assert Canary(revision=2, stable=1, planned=share).replicas(awake) == replicas
    assert RolloutTerms(first=share, last=share).blue_green == (share == 1000)


# ---- the tests ------------------------------------------------------------------------------------------------------


def strength(test, new, stable, share=0.05):
    logs = canary_tests.with_events(Evidence().errors, test, new, stable, share)
    return canary_tests.strength(Evidence(**{test: logs}), test)


def test_two_errors_of_a_twentieth_of_the_sessions_are_enough_where_others_have_none():
    assert strength(ERRORS, 1, 0) < 1
    assert strength(ERRORS, 2, 0) >= 1
    assert strength(ERRORS, 2, 2) < 1
    assert strength(ERRORS, 5, 95) == 0, "its share of the errors"
    assert strength(ERRORS, 0, 100) == 0
    assert strength(ERRORS, 3, 0, share=0.5) < 1
    assert strength(ERRORS, 10, 0, share=0.5) >= 1


def test_evidence_of_an_event_is_a_fair_bet_where_the_new_revision_is_no_worse():
    """The expected likelihood ratio is 1: what makes each test right however often it is looked at."""
    for test, share in itertools.product((ERRORS, FIRST_TOKENS, SPEEDS), (0.01, 0.05, 0.3, 0.5, 0.99)):
        own = canary_tests.with_events(Evidence().errors, test, 1, 0, share)
        other = canary_tests.with_events(Evidence().errors, test, 0, 1, share)
        for one, two in zip(own, other, strict=True):
            assert share * math.exp(one) + (1 - share) * math.exp(two) == pytest.approx(1.0)


def test_no_more_than_the_budget_is_sent_back_by_chance():
    """Events belong to the new revision with the probability of its share; each test looks after each event."""
    dice, wrong, runs = Random(7), 0, 400
    for _ in range(runs):
        logs = Evidence().errors
        for number in range(80):
            own = dice.random() < (0.05 if number < 40 else 0.2)
            logs = canary_tests.with_events(logs, ERRORS, int(own), int(not own), 0.05 if number < 40 else 0.2)
            if canary_tests.strength(Evidence(errors=logs), ERRORS) >= 1:
                wrong += 1
                break
    assert wrong <= runs * FALSE_ALARMS[ERRORS]
    assert sum(FALSE_ALARMS.values()) == pytest.approx(0.01)


def test_late_and_slow_are_judged_by_the_stable_revision_and_with_a_margin():
    times = {class_of(0.2): 90, class_of(0.5): 10}
    limit = canary_tests.late_class(times)
    assert canary_tests.late_class({class_of(0.2): 10}) is None, "too few"
    assert limit == class_of(0.2)
    assert canary_tests.late(times, limit, margin=False) == 10
    assert canary_tests.late({class_of(0.23): 5, class_of(0.3): 3}, limit, margin=True) == 3
    assert canary_tests.late({class_of(0.009): 5, class_of(0.02): 1}, class_of(0.002), margin=True) == 1, (
        "ms are nothing"
    )
    speeds = {class_of(50.0): 80, class_of(20.0): 20}
    assert canary_tests.slow_class(speeds) == class_of(20.0)
    assert canary_tests.slow({class_of(18.5): 4, class_of(10.0): 2}, class_of(20.0), margin=True) == 2


# ---- sessions -------------------------------------------------------------------------------------------------------


def session(path="/v1/chat/completions", header="", named=(), prompt=b"[]", user="ada", request_id="r1"):
    return session_of(path, header, named, prompt, user=user, request_id=request_id)


def chat(*texts):
    roles = ("user", "assistant")
    turns = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    return json.dumps([{"role": "system", "content": "Be brief."}, *turns]).encode()


def test_all_turns_of_a_conversation_are_one_session():
    first, second = session(prompt=chat("hello")), session(prompt=chat("hello", "hi", "why?"), request_id="r2")
    assert first.key == second.key
    assert (first.fresh, second.fresh) == (True, False)
    assert session(prompt=chat("good morning")).key != first.key
    assert session(prompt=chat("hello"), user="bob").key != first.key
    assert (
        session("/v1/responses", prompt=b'"hello"').key
        == session("/v1/responses", prompt=b'"hello"', request_id="2").key
    )


def test_names_of_sessions_go_before_conversations_and_the_header_before_names():
    named = session(named=(b"", b'"u7"', b'"k"'), prompt=chat("hello"))
    assert named.key == session(named=(b"null", b'"u7"', b""), prompt=chat("bye")).key
    assert session(header="s1", named=(b'"u7"',)).key == session(header="s1", named=(b'"u8"',)).key
    assert session(header="s1").key != session(header="s2").key
    assert session(header="\udcff").key, "bytes that are no text"


def test_requests_without_a_session_are_drawn_one_by_one():
    for path in ("/v1/completions", "/v1/embeddings", "/v1/rerank"):
        assert (
            session(path, prompt=b'"same"', request_id="r1").key != session(path, prompt=b'"same"', request_id="r2").key
        )


@pytest.mark.parametrize(
    "prompt", [b"", b"7", b"null", b"{}", b"[7]", b"[[[]]]", b'[{"role": 7}]', b'[{"role": ["user"]}]', b"\xff"]
)
def test_nonsense_has_some_session(prompt):
    assert session(prompt=prompt).key.startswith(b"ada\0")


def test_places_are_even_agree_between_gateways_and_differ_between_rollouts():
    meters = [RevisionMeter("web", CanaryShare(revision=4, share=50)) for _ in range(2)]
    sessions = [session(header=str(number)) for number in range(4000)]
    taken = {one.key for one in sessions if meters[0].takes(one)}
    assert {one.key for one in sessions if meters[1].takes(one)} == taken
    assert 140 < len(taken) < 260, "5 % of 4,000"
    meters[0].share = CanaryShare(revision=4, share=500)
    assert taken < {one.key for one in sessions if meters[0].takes(one)}, "no session goes back while the share grows"
    other = RevisionMeter("web", CanaryShare(revision=5, share=50))
    assert {one.key for one in sessions if other.takes(one)} != taken
    assert not meters[0].takes(None)


def meter():
    return RevisionMeter("web", CanaryShare(revision=4, share=50))


def test_a_session_that_fails_again_is_no_further_evidence():
    found = meter()
    for _ in range(3):
        with found.request(4, "job-1", session(header="s1"), stream=False) as trial:
            trial.failed(alone=True)
            trial.failed(alone=True)
    with found.request(4, "job-1", session(header="s2"), stream=False) as trial:
        trial.failed(alone=True)
    (figures,) = found.take()
    assert (figures.begun, figures.answered, figures.errors, figures.failing_sessions) == (4, 4, 4, 2)
    assert found.take() == []


def test_requests_that_fall_with_their_replica_are_one_piece_of_evidence(monkeypatch):
    now_s = itertools.count(1000.0, 0.01)
    monkeypatch.setattr("time.monotonic", lambda: next(now_s))
    found = meter()
    for number in range(40):
        with found.request(4, "job-1", session(header=str(number)), stream=False) as trial:
            trial.failed(alone=False)
    (figures,) = found.take()
    assert (figures.errors, figures.failing_sessions) == (40, 1)
    now_s = itertools.count(1001.0 + INCIDENT_S, 0.01)
    with found.request(4, "job-1", session(header="x"), stream=False) as trial:
        trial.failed(alone=False)
    assert found.take()[0].failing_sessions == 1


def test_only_first_turns_give_times_and_clients_that_leave_give_what_they_waited(monkeypatch):
    at_s = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: at_s[0])
    found = meter()
    with found.request(4, "job-1", session(prompt=chat("a")), stream=True) as trial:
        at_s[0] += 0.5
        trial.first_token()
        at_s[0] += 2.0
        trial.done(40)
    with found.request(4, "job-1", session(prompt=chat("a", "b", "c")), stream=True) as trial:
        trial.first_token()
        trial.done(40)
    waits = found.request(4, "job-1", session(prompt=chat("z")), stream=True)
    waits.__enter__()
    at_s[0] += 3.0
    (figures,) = found.take()
    assert figures.first_tokens == {class_of(0.5): 1}
    assert figures.speeds == {class_of(20.0): 1}
    assert figures.unanswered == {class_of(3.0): 1}
    assert (figures.begun, figures.answered) == (3, 2)
    at_s[0] += 1.0
    waits.__exit__(None, None, None)
    (figures,) = found.take()
    assert (figures.answered, figures.first_tokens, figures.unanswered) == (0, {class_of(4.0): 1}, {})
