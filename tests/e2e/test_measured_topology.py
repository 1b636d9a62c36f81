"""`phalanx topology --measure` finds the tree of a network that has one: four hosts of the lab on two switches with a thin link between."""

import json
import subprocess

import pytest

from tests.e2e.test_join import PHALANX, HeadOn, phalanx
from tests.lab.lab import Lab
from tests.lab.needs import why_not
from tests.lab.network import shape_command

pytestmark = [
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.root,
    pytest.mark.torch,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "the lab"),
    pytest.mark.timeout(400),
]

PORT_MBIT, UPLINK_MBIT = 400.0, 80.0  # slow enough that this machine's processors do not decide
MEASURE_S = 200.0


@pytest.fixture(scope="module")
def fleet():
    with Lab(size=4, gpus=0, rate_mbit=PORT_MBIT) as lab:
        put_on_a_second_switch(lab, ["h2", "h3"])
        head = HeadOn(lab, "h0")
        for name in ("h1", "h2", "h3"):
            code, said = head.join(name, devices=1)
            assert code == 0, said
        yield head
        for name in lab.hosts:
            phalanx(lab, name, "down", "--cancel-jobs")


def put_on_a_second_switch(lab, names):
    lines = ["link add far type bridge", "link set far up", "link add up0 type veth peer name up1"]
    lines += ["link set up0 master switch up", "link set up1 master far up"]
    lab._ip(lab.pid, [*lines, *(f"link set {name} master far" for name in names)])
    for end in ("up0", "up1"):
        lab._within(lab.pid, shape_command(end, UPLINK_MBIT))


def measure(head, *words):
    submission = [*PHALANX, "topology", "--measure", "--quick", *words]
    done = subprocess.run(
        head.lab.command("h0", submission, folder="/home/lab"),
        capture_output=True,
        text=True,
        timeout=MEASURE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.prove
def test_two_leafs_are_found_drawn_and_kept_and_a_word_of_a_person_overrides(fleet):
    found = json.loads(measure(fleet, "--nodes", "n0,h[1-3]", "--apply", "--plot", "tree.svg", "--json"))
    assert [level["domains"] for level in found["levels"]] == [[["h1", "n0"], ["h2", "h3"]]], found["pairs"]
    assert len(found["pairs"]) == 6
    inside, across = found["levels"][0]["bytes_per_s"] * 8e-6, found["bytes_per_s"] * 8e-6
    assert UPLINK_MBIT < inside <= 1.1 * PORT_MBIT
    assert across <= 1.1 * UPLINK_MBIT
    assert fleet.lab.run("h0", ["cat", "/home/lab/tree.svg"]).count("leaf m") == 2

    code, said = fleet.call("topology")
    assert code == 0, said
    assert next(" ".join(line.split()) for line in said.splitlines() if "leaf m" in line).endswith("h1,n0")

    assert fleet.call("nodes", "label", "h1", "leaf=by-hand")[0] == 0
    lines = fleet.lab.run("h0", [*PHALANX, "nodes", "--json"])
    labels = {node["id"]: node["labels"] for node in json.loads(lines)}
    assert labels["h1"] == {"leaf": "by-hand"}
    assert labels["h2"] == labels["h3"] == {"leaf": "m1", "topology": "measured"}
