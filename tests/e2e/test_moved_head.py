"""A head that moves to another address under a server that joined it: the server follows, and its job continues."""

import time

import pytest

from benchmarks.cluster import free_port
from tests.e2e.test_cli_head import Shell

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture
def shells(tmp_path):
    folders = tmp_path / "head", tmp_path / "member"
    for folder in folders:
        folder.mkdir()
    head, member = (Shell(folder) for folder in folders)
    yield head, member
    member("down", "--cancel-jobs")
    head("down", "--cancel-jobs")


def test_a_member_follows_its_head_to_another_address_and_its_job_continues(shells):
    head, member = shells
    old, new = (f"127.0.0.{last}:{free_port()}" for last in (2, 3))
    line = head("up", "--virtual", "1x1", "--port", str(free_port()), "--listen", old).stdout
    words = line.partition("phalanx join ")[2].splitlines()[0].split()
    assert "m1 has joined" in member("join", *words, "--virtual", "2", "--name", "m1").stdout
    job = head("submit", "--quiet", "--gpus", "2", "--", "sleep", "600").stdout.strip()
    head.until(job, "running")

    head("down", "--keep-jobs")
    moved = head("up", "--listen", new)
    assert f"1 joined server (m1) only know the old address {old}; run on each: phalanx join {new}" in moved.stderr
    followed = member("join", new).stdout
    assert f"m1 follows its head from https://{old} to https://{new}" in followed
    while not (node := nodes(head)["m1"]).get("sampled_s"):  # of a report since the head is at its new address
        time.sleep(0.2)
    assert node["state"] == "up"
    shown = head.json("show", job)
    assert [attempt["epoch"] for attempt in shown["attempts"]] == [1]
    assert shown["job"]["state"] == "running"

    refused = member("nodes", code=77).stderr
    assert f"this server is a node of the head at https://{new}" in refused
    member.env["PHALANX_TOKEN"] = (head.home / "token").read_text().strip()
    assert set(nodes(member)) == {"n0", "m1"}

    del member.env["PHALANX_TOKEN"]
    assert "m1 has left" in member("down", "--cancel-jobs").stdout
    assert nodes(head)["m1"]["state"] == "down"  # at once, however long its lease still lasts
    assert len(head.json("show", job)["attempts"]) == 1, "the job was placed again on the server that left"


def nodes(shell):
    return {node["id"]: node for node in shell.json("nodes")}
