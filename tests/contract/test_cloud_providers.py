"""The providers of clouds over HTTP, each against a server that answers as its cloud's reference says: one suite for all."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type"

import dataclasses
import time

import pytest

from benchmarks.clouds import azure_dialect, google_dialect
from phalanx.core.errors import BadRequest
from phalanx.core.fleet.node_console import console_text
from phalanx.core.fleet.node_pool import ListedMachine
from phalanx.ports.engine import MachineJoin
from phalanx.ports.provider import CallUnanswered, ConsoleReader, OfferRefused, PoolTerms
from tests.cloud_rigs import RIGS, SETTLE_S, head, open_rig


@pytest.fixture(params=sorted(RIGS))
def cloud(request, tmp_path, monkeypatch):
    with open_rig(request.param, tmp_path, monkeypatch) as rig:
        yield rig


def start(cloud, order):
    """Start as the head does: a call without an answer is repeated."""
    for _ in range(4):
        try:
            return cloud.provider.start(order)
        except CallUnanswered:
            time.sleep(1.1 * SETTLE_S if cloud.named else 0.0)
    raise AssertionError("no answer")


def terms(cloud, **fields):
    return PoolTerms(
        **{"template": cloud.template, "zones": cloud.zones, "settings": cloud.settings, "price_per_h": 2.0} | fields
    )


def test_a_pool_has_an_offer_for_each_zone_and_nothing_is_started(cloud):
    made = cloud.provider.offer(terms(cloud))
    assert [offer.text for offer in made.offers] == list(cloud.offers)
    assert made.listed
    assert made.devices
    assert made.cpus > 0
    assert cloud.faults.machines == {}


def test_a_head_that_listens_no_more_starts_no_machine_that_could_not_join(cloud):
    cloud.provider.head = head(listens=False)
    with pytest.raises(BadRequest, match="listens only on loopback"):
        cloud.provider.start(cloud.order())
    assert cloud.running() == []


def test_a_repeated_start_finds_the_first_machine_and_another_offer_is_another_one(cloud):
    first = cloud.provider.start(cloud.order())
    assert cloud.provider.start(cloud.order()) == first
    assert cloud.running() == [first.machine]
    known = cloud.faults.machines[first.machine]
    if not cloud.named:
        assert (known["token"], known["node"]) == (cloud.order().token, "p-0")
    assert abs(known["since_s"] - first.since_s) <= 1.0
    other = cloud.provider.start(cloud.order(1))
    assert cloud.running() == sorted([first.machine, other.machine])


@pytest.mark.parametrize("fault", ["lost before", "lost after", "twice", "throttled"])
def test_no_fault_of_a_start_makes_a_second_machine(cloud, fault):
    cloud.faults.next_fault = fault
    if fault != "twice":
        with pytest.raises(CallUnanswered):
            cloud.provider.start(cloud.order())
    found = start(cloud, cloud.order())
    if cloud.named and fault == "twice":  # without tokens nothing prevents it; the list has both, and a stop ends both
        assert len(cloud.running()) == 2
        cloud.provider.stop(cloud.order(known_machine=found.machine))
        assert cloud.running() == []
        return
    assert cloud.running() == [found.machine]
    assert len(cloud.faults.machines) == 1


@pytest.mark.parametrize("which", [0, 1])
def test_no_capacity_and_no_quota_are_refusals_that_leave_nothing(cloud, which):
    cloud.dialect.refused = cloud.codes[which]
    with pytest.raises(OfferRefused) as caught:
        start(cloud, cloud.order())
    assert cloud.codes[which].lower() in str(caught.value).lower()
    assert "\n" not in str(caught.value)
    assert cloud.running() == []
    assert cloud.dialect.leftovers() == []


@pytest.mark.parametrize("fault", ["", "lost before", "lost after", "twice", "throttled"])
def test_a_stop_is_charged_to_its_end_whatever_happens_to_the_call(cloud, fault):
    order = cloud.order()
    found = cloud.provider.start(order)
    known = dataclasses.replace(order, known_machine=found.machine)
    cloud.faults.next_fault = fault
    stopped = []
    for _ in range(4):
        try:
            stopped = cloud.provider.stop(known)
        except CallUnanswered:
            continue
        break
    assert cloud.running() == []
    bill = cloud.faults.machines[found.machine]
    (charged,) = stopped
    assert charged.machine == found.machine
    assert abs(charged.until_s - bill["until_s"]) <= 1.0
    assert abs((charged.since_s or found.since_s) - bill["since_s"]) <= 1.0
    cloud.provider.stop(known)  # once more, as a head does that was killed before it wrote the end
    assert cloud.dialect.leftovers() == []


def test_a_stop_needs_no_list_that_has_the_machine_yet(cloud):
    found = cloud.provider.start(cloud.order())
    cloud.faults.visible_s[found.machine] = float("inf")
    assert cloud.provider.machines(cloud.settings) == []
    cloud.provider.stop(cloud.order(known_machine=found.machine))
    assert cloud.running() == []


def test_a_head_that_was_killed_between_the_stop_and_its_record_learns_what_is_charged(cloud):
    order = cloud.order()
    with_answer = cloud.provider.start(order)
    cloud.provider.stop(order)  # the record has no machine: the answer to the start was lost with an earlier head
    later = dataclasses.replace(cloud.provider)
    later.open([order])
    bill = cloud.faults.machines[with_answer.machine]
    if cloud.named:  # these clouds do not say when a machine ended
        assert [one.until_s for one in later.stop(order)] in ([], [0.0])
        return
    (charged,) = later.stop(order)
    assert charged.machine == with_answer.machine
    assert abs(charged.since_s - bill["since_s"]) <= 1.0
    assert abs(charged.until_s - bill["until_s"]) <= 1.0


def test_a_stop_of_an_order_that_was_never_started_is_done_and_one_of_a_stray_leaves_the_others(cloud):
    assert list(cloud.provider.stop(cloud.order())) == []
    kept, stray = cloud.provider.start(cloud.order(1)), cloud.provider.start(cloud.order(2))
    cloud.provider.stop(cloud.order(1, machine=stray.machine))
    assert cloud.running() == [kept.machine]


def test_the_list_has_the_machines_of_this_head_of_all_pages(cloud):
    orders = [cloud.order(number) for number in range(23)]
    made = [cloud.provider.start(order).machine for order in orders]
    listed = cloud.provider.machines(cloud.settings)
    assert sorted(listed, key=lambda one: one.machine) == sorted(
        (
            ListedMachine(machine=machine, node_id=order.node_id, token=order.token, offer=order.offer)
            for machine, order in zip(made, orders, strict=True)
        ),
        key=lambda one: one.machine,
    )


def test_the_end_of_a_head_ends_its_machines_and_says_which_had_no_order(cloud):
    own, stray = cloud.order(), cloud.order(1)
    cloud.provider.start(own)
    known = cloud.provider.start(stray)
    cloud.provider.open([own])
    assert cloud.provider.close(keep_nodes=True) == ()
    assert len(cloud.running()) == 2
    ended = {one.stopped[0].machine: one for one in cloud.provider.close(keep_nodes=False)}
    assert cloud.running() == []
    assert len(ended) == 2
    assert ended[known.machine].stray
    assert [one.token for one in ended.values() if not one.stray] == [own.token]


@pytest.mark.parametrize("wrong", ["zone", "type", "setting", "loopback"])
def test_what_is_wrong_with_a_pool_is_one_line_and_nothing_is_started(cloud, wrong):
    provider, asked = cloud.provider, terms(cloud)
    if wrong == "zone":
        asked = terms(cloud, zones=(cloud.wrong_zone,))
    elif wrong == "type":
        if cloud.name == "runpod":
            pytest.skip("its table has no list of types")
        asked = terms(cloud, template="g9-imaginary-9")
    elif wrong == "setting":
        asked = terms(cloud, settings={**cloud.settings, "colour": "red"})
    else:
        provider = dataclasses.replace(provider, head=head(listens=False))
    with pytest.raises(BadRequest) as caught:
        provider.offer(asked)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert cloud.faults.machines == {}


@pytest.mark.parametrize("name", ["google", "azure"])
def test_what_a_machine_printed_is_read_without_its_token(name, tmp_path, monkeypatch):
    with open_rig(name, tmp_path, monkeypatch) as cloud:
        join = MachineJoin(address="h:1", token="phxm.1796030480.0123abcd", fingerprint="f")
        cloud.provider.head.machine_join = lambda node, order: join
        order = cloud.order()
        found = cloud.provider.start(order)
        raw = cloud.provider.console(dataclasses.replace(order, known_machine=found.machine))
        assert join.token in raw
        kept = console_text(raw)
        assert kept.splitlines()[0] == "#!/bin/sh"
        assert "PHALANX_JOIN_TOKEN=[token]" in kept
        assert "phxm" not in kept
        with pytest.raises(OSError, match=r"(?i)not found"):
            cloud.provider.console(dataclasses.replace(order, known_machine=f"{cloud.zones[0]}/404"))


def test_the_console_of_clouds_with_a_table_is_not_offered(cloud):
    assert isinstance(cloud.provider, ConsoleReader) is not cloud.named


# ---- credentials and rights: what each cloud says in its own words ----------------------------------------------------------


def test_credentials_that_the_cloud_does_not_accept_are_one_line(cloud):
    cloud.spoil_credentials()
    for call in (lambda: cloud.provider.offer(terms(cloud)), lambda: cloud.provider.check(cloud.settings)):
        with pytest.raises(BadRequest) as caught:
            call()
        assert "\n" not in str(caught.value)
        assert "credentials" in str(caught.value)
    assert cloud.faults.machines == {}


@pytest.mark.parametrize("name", ["google", "azure"])
def test_an_access_token_that_the_cloud_takes_back_is_renewed_once(name, tmp_path, monkeypatch):
    with open_rig(name, tmp_path, monkeypatch) as cloud:
        cloud.provider.start(cloud.order())
        module = {"google": google_dialect, "azure": azure_dialect}[name]
        monkeypatch.setattr(module, "ACCESS", "another-access-token")
        cloud.provider.start(cloud.order(1))
        assert len(cloud.running()) == 2
        assert sum(one.path.endswith("/token") for one in cloud.seen) == 2
        monkeypatch.setattr(module, "ACCESS", "a-third-access-token")
        cloud.spoil_credentials()
        with pytest.raises(BadRequest, match="does not accept the credentials"):
            cloud.provider.start(cloud.order(2))
        assert len(cloud.running()) == 2


def test_credentials_that_are_missing_are_one_line(cloud, monkeypatch):
    cloud.drop_credentials()
    with pytest.raises(BadRequest, match=r"^no .* credentials"):
        cloud.provider.check(cloud.settings)
    assert sum(cloud.faults.counts.values()) == 0


def test_a_missing_right_is_named_and_no_pool_is_made(cloud):
    if cloud.right is None:
        pytest.skip("this cloud's keys have no rights of their own")
    full = cloud.provider.check(cloud.settings)
    assert all(one.allowed for one in full.rights)
    assert cloud.right in full.policy
    cloud.revoke(cloud.right)
    found = cloud.provider.check(cloud.settings)
    assert [one.name for one in found.rights if not one.allowed] == [cloud.right]
    with pytest.raises(BadRequest) as caught:
        cloud.provider.offer(terms(cloud))
    assert cloud.right in str(caught.value)
    assert cloud.faults.machines == {}


# ---- Azure has names instead of tokens -------------------------------------------------------------------------------------


@pytest.fixture
def azure(tmp_path, monkeypatch):
    with open_rig("azure", tmp_path, monkeypatch) as rig:
        yield rig


def test_a_create_of_a_machine_that_arrives_after_the_stop_makes_no_second_one(azure):
    order = azure.order()
    azure.provider.start(order)
    late = [one for one in azure.seen if one.method == "PUT" and "virtualMachines" in one.path]
    azure.provider.stop(order)
    assert azure.dialect.answer(late[0]).status == 400
    assert azure.running() == []
    assert len(azure.faults.machines) == 1


def test_a_machine_that_a_late_call_started_where_a_later_one_was_refused_is_charged(azure):
    order = azure.order()
    azure.dialect.refused = "AllocationFailed"
    create = azure.dialect._put_machine

    def refused_then_late(call, name):
        found = create(call, name)
        azure.dialect.refused = ""
        create(call, name)  # the first call, which had no answer, arrives now
        return found

    azure.dialect._put_machine = refused_then_late
    with pytest.raises(OSError, match="started by a late call") as caught:
        azure.provider.start(order)
    assert not isinstance(caught.value, (OfferRefused, CallUnanswered))
    assert azure.running() == []
    (charged,) = azure.provider.stop(order)
    assert charged.until_s > 0.0


def test_what_a_deletion_leaves_is_listed_and_stopped_as_a_stray(azure):
    order = azure.order()
    found = azure.provider.start(order)
    disk = azure.dialect.kept["disks", f"{found.machine}-disk"]
    azure.provider.stop(order)
    azure.dialect.kept["disks", f"{found.machine}-disk"] = disk  # it was deleted in part
    assert azure.dialect.leftovers() == [f"{found.machine}-disk"]
    (listed,) = azure.provider.machines(azure.settings)
    assert (listed.machine, listed.token) == (found.machine, order.token)
    azure.provider.stop(azure.order(machine=listed.machine))
    assert azure.dialect.leftovers() == []


def test_a_machine_whose_end_the_log_does_not_have_yet_is_stopped_again(azure):
    order = azure.order()
    found = azure.provider.start(order)
    azure.faults.next_fault = "lost after"
    known = dataclasses.replace(order, known_machine=found.machine)
    with pytest.raises(CallUnanswered):
        azure.provider.stop(known)
    entries, azure.dialect.log = azure.dialect.log, []
    with pytest.raises(CallUnanswered, match="does not have its end yet"):
        azure.provider.stop(known)
    azure.dialect.log = entries
    (charged,) = azure.provider.stop(known)
    assert abs(charged.until_s - azure.faults.machines[found.machine]["until_s"]) <= 1.0
