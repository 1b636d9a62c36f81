"""Nodes prove themselves before rank 0 starts: four hosts of the lab, one of which is broken in a way that its lease does not show."""

import json
import time

import pytest

from tests.e2e.test_join import PHALANX, HeadOn, phalanx, until
from tests.lab.lab import Lab
from tests.lab.needs import why_not
from tests.lab.slurm import Slurm, why_no_slurm
from tests.lab.typed import OnSlurm

pytestmark = [
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.root,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "the lab"),
    pytest.mark.timeout(300),
]

SWAP_S = 60.0
"""A guard: a bad link is found after 5 s, and the whole job takes 6 s on an idle machine; a collective would have waited for ten minutes."""


@pytest.fixture(scope="module")
def lab():
    with Lab(size=4, gpus=0) as made:
        yield made


@pytest.fixture(scope="module")
def fleet(lab):
    head = HeadOn(lab, "h0")
    for name in ("h1", "h2", "h3"):
        if name == "h2":
            lab.run(
                name, ["sh", "-c", "mkdir -p /home/lab/.phalanx && mount -t tmpfs -o size=256m none /home/lab/.phalanx"]
            )
        code, said = head.join(name)
        assert code == 0, said
    yield head
    for name in lab.hosts:
        phalanx(lab, name, "down", "--cancel-jobs")


@pytest.fixture(autouse=True)
def whole(lab, fleet):
    yield
    for name in lab.hosts:
        lab.run(name, ["iptables", "-F", "INPUT"])
        fleet.call("nodes", "undrain", name)
    lab.run("h2", ["rm", "-f", "/home/lab/.phalanx/filling"])


def silence(lab, name, *rule):
    """Let packets that match vanish as they arrive at a host."""
    lab.run(name, ["iptables", "-A", "INPUT", *rule, "-j", "DROP"])


def gang(fleet, *, nodes=3):
    """Submit a gang over so many hosts, and wait for its end: the nodes of each attempt, and how long it took."""
    began = time.monotonic()
    submission = [*PHALANX, "submit", "-C", "/", "--gpus", f"{nodes}x2", "--json", "--", "hostname"]
    job_id = json.loads(fleet.lab.run(fleet.name, submission))["job"]["id"]
    until(lambda: show(fleet, job_id)["job"]["state"] not in ("pending", "running"), f"job {job_id} ends")
    took_s = time.monotonic() - began
    found = show(fleet, job_id)
    assert found["job"]["state"] == "succeeded", fleet.call("show", job_id)[1]
    return [sorted(grant["node_id"] for grant in one["grants"]) for one in found["attempts"]], took_s, job_id


def show(fleet, job_id):
    code, said = fleet.call("show", job_id, "--json")
    assert code == 0, said
    return json.loads(said)


def kept_out(fleet):
    return {name: node["cordon"]["why"] for name, node in fleet.nodes().items() if node["cordon"]}


def test_a_sound_gang_is_not_held_up(fleet):
    attempts, took_s, _ = gang(fleet, nodes=4)
    assert attempts == [["h1", "h2", "h3", "n0"]]
    assert took_s < SWAP_S


def test_a_link_that_is_dead_between_two_nodes_alone_is_found_and_one_of_them_swapped(lab, fleet):
    silence(lab, "h1", "-s", lab.host("h2").address)
    silence(lab, "h2", "-s", lab.host("h1").address)
    attempts, took_s, job_id = gang(fleet)
    assert len(attempts) <= 2
    assert not {"h1", "h2"} <= set(attempts[-1])
    assert took_s < SWAP_S
    assert kept_out(fleet) == {}
    if len(attempts) == 2:
        assert show(fleet, job_id)["attempts"][0]["why"] == (
            "link h2 - h1: no connection in 5 s; either end may be at fault"
        )


@pytest.mark.parametrize(
    ("rule", "evidence"),
    [
        ([], "no connection in 5 s"),  # a firewall; the way to the head stays open
        (
            ["-m", "length", "--length", "1400:65535"],
            "do not come back (not in 5 s): is the MTU too large for the path?",
        ),
    ],
    ids=["closed", "for-small-packets-alone"],
)
def test_a_node_whose_ranks_nobody_could_reach_is_swapped_and_kept_out(lab, fleet, rule, evidence):
    silence(lab, "h1", "-p", "tcp", "--dport", "20000:31999", *rule)
    attempts, took_s, _ = gang(fleet)
    assert [("h1" in names) for names in attempts] == [True, False]
    assert took_s < SWAP_S
    assert list(kept_out(fleet)) == ["h1"]
    assert kept_out(fleet)["h1"].endswith(evidence)
    assert f"{evidence} (preflight)" in fleet.call("nodes", "show", "h1")[1]
    code, said = fleet.call("nodes", "undrain", "h1")
    assert (code, kept_out(fleet)) == (0, {}), said


def test_a_node_with_a_full_disk_is_swapped_and_kept_out_with_what_was_free(lab, fleet):
    lab.run("h2", ["fallocate", "-l", "250M", "/home/lab/.phalanx/filling"])
    attempts, took_s, _ = gang(fleet)
    if "h2" not in attempts[0]:
        attempts, took_s, _ = gang(fleet, nodes=4)
    assert [("h2" in names) for names in attempts] == [True, False]
    assert took_s < SWAP_S
    assert "MiB free, 64 MiB needed" in kept_out(fleet)["h2"]


@pytest.mark.skipif(bool(why_no_slurm()), reason=why_no_slurm() or "Slurm")
def test_supervisors_that_slurm_brings_for_one_attempt_probe_each_other_too():
    with Lab(gpus=2) as lab:
        built = Slurm(lab=lab)
        built.start()
        phalanx = OnSlurm(lab)
        said = phalanx(f"up --engine slurm --listen {lab.host('h0').address}")
        assert "h2: 2 x h100" in said, said
        silence(lab, "h1", "-p", "tcp", "--dport", "20000:31999")
        job = phalanx.submit("-C / --gpus 2x2 -- hostname")
        assert phalanx.ended(job)["state"] == "succeeded", phalanx(f"show {job}")
        tries = phalanx.job(job)["attempts"]
        assert [grant["node_id"] for grant in tries[-1]["grants"]] == ["h0", "h2"]
        assert [one["cause"] for one in tries] == ["unfit"] * (len(tries) - 1) + ["succeeded"]
        assert len(tries) > 1
        assert all("no connection in" in one["why"] for one in tries[:-1])
        phalanx("down --cancel-jobs")
