"""The provider `command`: a script of the operator with three verbs, whatever it answers or does not."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type"

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.cluster import wait_until
from phalanx.core.errors import BadRequest
from phalanx.core.fleet.node_pool import ChargedMachine, ListedMachine
from phalanx.ports.engine import MachineJoin
from phalanx.ports.provider import CallUnanswered, NodeOrder, OfferRefused, PoolTerms, StartedMachine
from phalanx.providers.command.provider import CommandProvider

SCRIPT = """#!/bin/sh
asked=$(cat); echo "$1 $asked" >> calls
case "$1 $asked" in {cases}
esac
"""
EMPTY_LIST = """list*) echo '{"machines": []}';;"""


def is_dead(pid):
    try:
        return "zombie" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "providers"
    made.mkdir(mode=0o700)
    return made


def provider(folder, *cases, listens=True):
    path = folder / "vms"
    path.write_text(SCRIPT.replace("{cases}", "\n".join([*cases, EMPTY_LIST])))
    path.chmod(0o700)
    head = SimpleNamespace(
        state_folder=str(folder.parent),
        derive_id=lambda purpose: "0123456789abcdef" * 4,
        machine_join=(lambda node, order: MachineJoin(address="h:1", token=f"phxm.{node}", fingerprint="sha256:0"))
        if listens
        else None,
    )
    return CommandProvider(head=head, folder=str(folder))


def order(**fields):
    settings = {"script": "vms", "image": "u24", **fields.pop("settings", {})}
    return NodeOrder(
        **{"node_id": "p-0", "token": "p-0-k", "template": "1xh100:8", "pool": "p", "offer": "a", "settings": settings}
        | fields
    )


def calls(folder):
    lines = (folder / "calls").read_text().splitlines()
    return [(line.partition(" ")[0], json.loads(line.partition(" ")[2])) for line in lines]


def test_the_script_gets_the_order_and_its_machine_is_what_it_says(folder):
    one = provider(
        folder,
        """start*) echo '{"machine": "vm-1", "since_s": 5.5}';;""",
        """stop*) echo '{"until_s": 9}';;""",
        """list*) echo '{"machines": [{"machine": "vm-1", "node": "p-0", "token": "p-0-k", "zone": "a"}]}';;""",
        """console*) echo '{"console": "no driver"}';;""",
    )
    assert one.start(order()) == StartedMachine(machine="vm-1", since_s=5.5)
    assert one.stop(order(machine="vm-1")) == [ChargedMachine(machine="vm-1", until_s=9.0)]
    assert one.machines({"script": "vms"}) == [ListedMachine(machine="vm-1", node_id="p-0", token="p-0-k", offer="a")]
    assert one.console(order(known_machine="vm-1")) == "no driver"
    (start, asked), (stop, stopped), (listed, terms), (read, about) = calls(folder)
    assert (read, about["machine"], about["token"]) == ("console", "vm-1", "p-0-k")
    assert (start, stop, listed) == ("start", "stop", "list")
    assert asked == {
        "owner": "0123456789abcdef",
        "pool": "p",
        "node": "p-0",
        "token": "p-0-k",
        "template": "1xh100:8",
        "zone": "a",
        "settings": {"image": "u24"},
        "join": {"address": "h:1", "token": "phxm.p-0", "fingerprint": "sha256:0"},
    }
    assert (stopped["token"], stopped["machine"]) == ("p-0-k", "vm-1")
    assert terms == {"owner": "0123456789abcdef", "settings": {}}


@pytest.mark.parametrize(
    ("case", "error", "words"),
    [
        ("""echo '{"refused": "no H100 in a"}'""", OfferRefused, "no H100 in a"),
        ("""echo '{"failed": "wrong key"}'""", OSError, "wrong key"),
        ("echo trouble >&2; echo with keys >&2; exit 3", CallUnanswered, "start: exit code 3: with keys"),
        ("exit 3", CallUnanswered, "start: exit code 3: no message"),
        ("kill -9 $$", CallUnanswered, "start: signal 9"),
        ("echo yes", CallUnanswered, "start: the answer is not a JSON object: 'yes"),
        ("echo '[1]'", CallUnanswered, "not a JSON object"),
        ("echo '{}'", CallUnanswered, 'start: the answer has no "machine"'),
        ("true", CallUnanswered, "not a JSON object: ''"),
    ],
)
def test_what_a_script_may_answer_to_a_start(folder, case, error, words):
    one = provider(folder, f"start*) {case};;")
    with pytest.raises(error, match=re.escape(words)) as caught:
        one.start(order())
    assert type(caught.value) is error


def test_a_script_that_does_not_end_is_ended_with_its_children(folder):
    one = provider(folder, "start*) sleep 600 & echo $! > child; sleep 600;;")
    with pytest.raises(CallUnanswered, match=r"start: no answer within 0\.3 s"):
        one.start(order(settings={"deadline": "0.3s"}))
    child = int((folder / "child").read_text())
    # Its group was killed; when the kernel has carried that out is not ours to say.
    assert wait_until(lambda: is_dead(child), "the child ends")


@pytest.mark.parametrize("keep", [True, False])
def test_a_head_that_stops_without_its_nodes_stops_their_machines(folder, keep):
    one = provider(folder, """start*) echo '{"machine": "vm-1"}';;""", "stop*) echo '{}';;")
    one.open([order(token="p-1-k")])
    one.start(order())
    one.start(order(token="p-2-k"))
    one.stop(order(token="p-2-k"))
    one.close(keep_nodes=keep)
    stopped = [asked["token"] for verb, asked in calls(folder) if verb == "stop"]
    assert stopped == ["p-2-k", *([] if keep else ["p-1-k", "p-0-k"])]


def test_a_list_that_is_not_complete_is_an_error(folder):
    for case in ("exit 1", "echo '{}'", """echo '{"machines": [{"machine": "x"}]}'""", """echo '{"failed": "keys"}'"""):
        with pytest.raises(OSError, match=r"list|keys"):
            provider(folder, f"list*) {case};;").machines({"script": "vms"})


def test_each_zone_is_an_offer_and_the_template_says_what_a_node_has(folder):
    one = provider(folder)
    made = one.offer(
        PoolTerms(template="1xh100:8", zones=("b", "a", "b"), settings={"script": "vms", "cpus": "96"}, price_per_h=9.0)
    )
    assert [(offer.text, offer.zone, offer.price_per_h) for offer in made.offers] == [("b", "b", 9.0), ("a", "a", 9.0)]
    assert (made.listed, len(made.devices), made.cpus) == (True, 8, 96)
    assert {device.model for device in made.devices} == {"h100-sxm5-80gb"}
    assert one.offer(PoolTerms(template="2", settings={"script": "vms"})).devices[0].virtual


@pytest.mark.parametrize(
    ("settings", "template", "words"),
    [
        ({}, "2", "not the name of a file"),
        ({"script": "../vms"}, "2", "not the name of a file"),
        ({"script": "other"}, "2", "No such file"),
        ({"script": "vms", "deadline": "1h"}, "2", "at most 600 s"),
        ({"script": "vms", "cpus": "many"}, "2", "not a number of CPUs"),
        ({"script": "vms"}, "h9000:2", "h9000"),
        ({"script": "vms"}, "2x2x2", "is not"),
    ],
)
def test_what_a_pool_cannot_be_is_refused_in_one_line(folder, settings, template, words):
    with pytest.raises(BadRequest) as caught:
        provider(folder).offer(PoolTerms(template=template, settings=settings))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_script_that_others_may_change_does_not_run(folder):
    one = provider(folder)
    (folder / "vms").chmod(0o722)
    with pytest.raises(BadRequest, match="can be changed by others"):
        one.offer(PoolTerms(template="2", settings={"script": "vms"}))
    with pytest.raises(CallUnanswered, match="can be changed by others"):
        one.start(order())
    assert not (folder / "calls").exists()


def test_a_head_on_loopback_alone_has_no_such_pool(folder):
    with pytest.raises(BadRequest, match="listens only on loopback"):
        provider(folder, listens=False).offer(PoolTerms(template="2", settings={"script": "vms"}))
