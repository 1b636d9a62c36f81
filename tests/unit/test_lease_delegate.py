"""Leases whose renewals another process answers: nothing is declared lost that was answered, and nothing is answered that is lost. Virtual time."""

# Ids are written as plain words here.
# mypy: disable-error-code="arg-type, list-item"

import random

import pytest

from phalanx.app.renewal_process import RenewalTables
from phalanx.controller.leases import (
    MARGIN_S,
    RENEWALS_PER_LEASE,
    DelegatedAnswer,
    DelegateLost,
    LeaseBook,
    UnknownSupervisor,
)
from phalanx.wire.renewals import AnswerFor, FetchRenewals, SetCurrent, SetTerms
from phalanx.wire.supervisor import LeaseRequest

LEASE_S = 6.0


class InThisProcess:
    """The process's own tables, without sockets. `dead`: every call finds it gone."""

    def __init__(self):
        self.tables = RenewalTables()
        self.dead = False
        self.fetches = 0

    def _apply(self, command):
        if self.dead:
            raise DelegateLost("it has ended")
        return self.tables.apply(command)

    def set_terms(self, lease_s, renew_in_s):
        self._apply(SetTerms(lease_s=lease_s, renew_in_s=renew_in_s))

    def answer_for(self, connection, node_id, supervisor_id, ends_s, current):
        self._apply(
            AnswerFor(
                connection=connection, name=node_id, supervisor_id=supervisor_id, ends_s=ends_s, current=dict(current)
            )
        )

    def set_current(self, node_id, job_id, epoch):
        self._apply(SetCurrent(name=node_id, job_id=job_id, epoch=epoch))

    def fetch(self, revoked):
        self.fetches += 1
        found = self._apply(FetchRenewals(revoked=None if revoked is None else list(revoked)))
        return [
            DelegatedAnswer(
                node_id=one.name, supervisor_id=one.supervisor_id, renewed_s=one.renewed_s, ends_s=one.ends_s
            )
            for one in found.renewals
        ]


@pytest.fixture
def other():
    return InThisProcess()


@pytest.fixture
def book(other):
    made = LeaseBook(lease_s=LEASE_S)
    made.attach_delegate(other)
    return made


def asked(epochs=(), held_s=0.0, who="s1"):
    return LeaseRequest(supervisor_id=who, node_id="n0", epochs=list(epochs), held_s=held_s)


def delegated(book, now_s=0.0, connection=1, node="n0", who="s1"):
    book.grant(node, who, now_s)
    book.renew(node, who, [], now_s)
    book.delegate_renewals(node, who, connection, now_s)


def test_what_the_process_answered_is_known_before_the_lease_expires(book, other):
    delegated(book)
    for now_s in (1.5, 3.0, 4.5, 6.0, 7.5):
        assert other.tables.renew(1, asked(), now_s)
    assert book.next_check_s() < 8.0, "the head has heard nothing since"
    assert book.expire(8.0) == []
    assert book.next_check_s() == pytest.approx(7.5 + LEASE_S + MARGIN_S)


def test_a_silent_node_is_lost_one_lease_after_its_last_answer_and_never_answered_again(book, other):
    delegated(book)
    assert other.tables.renew(1, asked(), 1.5)
    assert book.expire(1.5 + LEASE_S + MARGIN_S - 0.01) == []
    assert book.expire(1.5 + LEASE_S + MARGIN_S) == ["n0"]
    assert not other.tables.renew(1, asked(), 1.5 + LEASE_S + MARGIN_S), "revoked by the same fetch"
    with pytest.raises(UnknownSupervisor):
        book.renew("n0", "s1", [], 9.0)


def test_only_current_epochs_are_answered_and_the_head_decides_about_all_others(book, other):
    delegated(book)
    assert not other.tables.renew(1, asked([("7", 1)]), 0.5)
    book.set_current("n0", "7", 1)
    assert other.tables.renew(1, asked([("7", 1)]), 0.5)
    assert not other.tables.renew(1, asked([("7", 2)]), 0.5)
    book.set_current("n0", "7", None)
    assert not other.tables.renew(1, asked([("7", 1)]), 0.5)
    assert book.renew("n0", "s1", [("7", 1)], 0.5).superseded == [("7", 1)]


def test_another_supervisor_ends_the_answers_for_the_first(book, other):
    delegated(book)
    book.grant("n0", "s2", 1.0)
    assert not other.tables.renew(1, asked(), 1.0)
    assert not other.tables.renew(1, asked(who="s2"), 1.0), "it has not renewed on this connection"


def test_a_new_connection_takes_the_place_of_the_old(book, other):
    delegated(book)
    book.renew("n0", "s1", [], 1.0)
    book.delegate_renewals("n0", "s1", 2, 1.0)
    assert not other.tables.renew(1, asked(), 1.5)
    assert other.tables.renew(2, asked(), 1.5)
    other.tables.close(2)
    assert book.expire(1.5 + LEASE_S + MARGIN_S - 0.01) == [], "what was answered on a closed connection counts"


def test_nothing_is_answered_after_the_term_of_the_head(book, other):
    delegated(book)
    other.tables.leads_until_s = 2.0
    assert other.tables.renew(1, asked(), 1.9)
    assert not other.tables.renew(1, asked(), 2.0)
    other.tables.leads_until_s = 4.0
    assert other.tables.renew(1, asked(), 2.1), "the term was renewed"


def test_a_process_that_ends_leaves_its_leases_presumed_live(book, other):
    delegated(book)
    book.set_current("n0", "7", 1)
    assert other.tables.renew(1, asked([("7", 1)]), 6.5), "the head never learns of it"
    other.dead = True
    assert book.expire(8.0) == []
    assert book.next_check_s() == pytest.approx(8.0 + LEASE_S + MARGIN_S)
    assert book.renew("n0", "s1", [("7", 1)], 9.0).superseded == []
    assert book.expire(9.0 + LEASE_S + MARGIN_S) == ["n0"]


def test_long_leases_are_granted_by_the_head_itself(book, other):
    delegated(book)
    book.grant_long(600.0, 10.0)
    assert not other.tables.renew(1, asked(), 1.0)
    assert book.renew("n0", "s1", [], 1.0).lease_s == 600.0
    book.delegate_renewals("n0", "s1", 1, 1.0)
    assert not other.tables.renew(1, asked(), 2.0)
    assert book.all_long()


def test_a_long_lease_is_renewed_by_the_head_until_it_is_an_ordinary_one(book, other):
    book.grant("n0", "s1", 0.0, until_s=300.0)
    book.set_current("n0", "7", 1)
    for now_s, held_s, answers in ((0.0, 250.0, False), (10.0, 240.0, False), (20.0, 4.0, True)):
        book.renew("n0", "s1", [("7", 1)], now_s, held_s=held_s)
        book.delegate_renewals("n0", "s1", 1, now_s)
        assert other.tables.renew(1, asked([("7", 1)], held_s=held_s), now_s) is answers
    assert book.expire(20.0 + LEASE_S + MARGIN_S) == ["n0"]


def test_ten_thousand_nodes_have_leases_of_ten_seconds():
    assert LeaseBook().terms_for(10_000, 10_000) == (10.0, 2.5)
    assert LeaseBook().terms_for(10_000) == (100.0, 25.0)
    assert LeaseBook().terms_for(600) == (6.0, 1.5)


def test_terms_follow_the_fleet_and_a_node_that_was_told_a_long_interval_is_not_lost_by_a_shorter_one(other):
    book = LeaseBook(lease_s=LEASE_S)
    book.attach_delegate(other)
    for number in range(2000):
        book.grant(f"n{number}", "s1", 0.0)
    for number in range(2000):
        book.renew(f"n{number}", "s1", [], 0.0)
    told_s = book.terms[1]
    assert book.crowded
    for number in range(1, 2000):
        book.delegate_renewals(f"n{number}", "s1", number, 0.0)
    assert book.terms == (LEASE_S, LEASE_S / RENEWALS_PER_LEASE)
    assert (other.tables.lease_s, other.tables.renew_in_s) == book.terms
    assert "n0" not in book.expire(told_s + 0.1), "it renews when it was told to"


@pytest.mark.parametrize("seed", range(60))
def test_no_lease_is_lost_that_a_supervisor_still_holds_whatever_happens(seed):
    """The supervisor counts from sending: whatever it was answered last must not be over for the head before it is over for the supervisor."""
    chance = random.Random(seed)
    book, now_s, connection = LeaseBook(lease_s=LEASE_S), 0.0, 0
    other = InThisProcess()
    book.attach_delegate(other)
    held: dict[str, float] = {}
    places: dict[str, int] = {}
    for node in "abcd":
        book.grant(node, "s1", now_s)
        book.set_current(node, "7", 1)  # a node without attempts is lost after an ordinary lease, whatever it holds
    for _ in range(400):
        now_s += chance.expovariate(1.0)
        node = chance.choice("abcd")
        match chance.choice(["renew"] * 6 + ["move", "expire", "expire", "kill", "long", "current", "drop", "sleep"]):
            case "renew":
                sent_s = now_s - chance.uniform(0.0, 0.5)
                left_s = max(0.0, held.get(node, 0.0) - sent_s)
                request = LeaseRequest(supervisor_id="s1", node_id=node, epochs=[], held_s=left_s)
                if not other.dead and other.tables.renew(places.get(node, 0), request, now_s):
                    lease_s = other.tables.lease_s
                else:
                    try:
                        lease_s = book.renew(node, "s1", [], now_s, held_s=left_s).lease_s
                    except UnknownSupervisor:
                        assert held.get(node, 0.0) <= now_s, "refused, so it had been over"
                        book.drop([node])
                        book.grant(node, "s1", now_s)
                        book.set_current(node, "7", 1)
                        held.pop(node, None)
                        continue
                if chance.random() < 0.8:  # else the answer is lost, and the supervisor keeps what it had
                    held[node] = sent_s + lease_s
            case "move":
                connection += 1
                places[node] = connection
                book.delegate_renewals(node, "s1", connection, now_s)
            case "expire":
                for gone in book.expire(now_s):
                    assert held.get(gone, 0.0) <= now_s, f"seed {seed}: {gone} holds its lease until {held[gone]}"
            case "kill":
                other.dead = True
                other.tables = RenewalTables()
                if chance.random() < 0.5:
                    other = InThisProcess()
                    book.attach_delegate(other)
            case "long" if chance.random() < 0.2:
                book.grant_long(60.0, now_s + 10.0)
            case "current":
                book.set_current(node, "7", chance.choice([1, 2]))
            case "sleep":
                book.presume_live(now_s)
            case _:
                pass
