"""Jobs run as the account of their owner: on a real cluster of a root head, what a job may do, and what it may not do to others."""

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.owners_rig import ACCOUNTS, LIMIT_S, TEAM_GID, Cluster, unfit

pytestmark = [pytest.mark.serial, pytest.mark.skipif(unfit() != "", reason=unfit())]
PYTHON = "/usr/bin/python3"  # one that every account may run; the tests' own may lie in root's home
PROBE = Path(__file__).with_name("owners_probe.py")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    try:
        made.up()
        yield made
    finally:
        made.down()


def _until(condition, what: str):
    until_s = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < until_s, f"waited {LIMIT_S} s for {what}"
        time.sleep(0.05)
    return found


def _shared(cluster: Cluster) -> Path:
    folder = cluster.root / "shared"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o1777)
    return folder


def test_a_job_has_the_user_the_groups_and_the_home_of_its_owner_and_no_way_to_more(cluster):
    said = cluster.run(
        "ada",
        'id -u; id -g; id -G; pwd; echo "$HOME $USER $LOGNAME"; grep -E "CapEff|CapPrm|NoNewPrivs" /proc/self/status',
    ).stdout
    uid, gid, groups, cwd, names, *rights = said.splitlines()
    home = str(cluster.home("ada"))
    assert (int(uid), int(gid), cwd) == (ACCOUNTS["ada"], ACCOUNTS["ada"], home)
    assert {int(word) for word in groups.split()} == {ACCOUNTS["ada"], TEAM_GID}
    assert names == f"{home} ada ada"
    assert [line.split()[1].strip("0") for line in rights] == ["", "", "1"]


def test_nothing_of_the_shell_that_started_the_cluster_reaches_another_accounts_job(cluster):
    said = cluster.run("ada", "env").stdout
    assert "OPERATORS_SECRET" not in said
    assert not re.search(r"^(SSH_|SUDO_|PHALANX_(TOKEN|URL|HOME|NODE_TOKEN)=)", said, re.MULTILINE)


def test_a_job_of_the_heads_own_account_runs_as_before(cluster):
    said = cluster.run("root", "id -u; echo $PHALANX_OUTPUT_DIR").stdout.split()
    assert said[0] == "0"
    assert said[1].startswith(str(cluster.state))


@pytest.mark.parametrize(("user", "says"), [("nobodys", "no account here"), ("daemonlike", "below 1000")])
def test_a_user_without_a_fit_account_is_refused_in_one_line(cluster, user, says):
    done = cluster.run(user, "id", check=False)
    assert done.returncode != 0
    assert "uid=" not in done.stdout
    assert [line for line in done.stderr.splitlines() if says in line and user in line], done.stderr


def test_a_job_cannot_touch_another_ones_processes_files_or_pipes_nor_anything_of_ours(cluster):
    shared = _shared(cluster)
    names = [
        "PHALANX_OUTPUT_DIR",
        "PHALANX_CHECKPOINT_DIR",
        "PHALANX_HOSTFILE",
        "PHALANX_LEASE_PAGE",
        "PHALANX_REPORT_PIPE",
    ]
    lines = "\n".join(f"{name} ${name}" for name in names)
    victim = cluster.submit(
        "ben",
        f'echo "pid $$\n{lines}" > {shared}/facts.new; mv {shared}/facts.new {shared}/facts; exec env BENS=own sleep 600',
    )
    _until((shared / "facts").exists, "ben's job")
    facts = dict(line.split(" ", 1) for line in (shared / "facts").read_text().splitlines())
    told = {
        **facts,
        "pid": int(facts["pid"]),
        "home": str(cluster.home("ben")),
        "state": str(cluster.state),
        "uid": ACCOUNTS["ben"],
        "attempt": os.path.dirname(facts["PHALANX_OUTPUT_DIR"]),
    }
    probe = shared / "probe.py"
    probe.write_text(PROBE.read_text())
    said = json.loads(cluster.run("ada", f"exec {PYTHON} {probe} '{json.dumps(told)}'").stdout)
    assert said["got"] == []
    assert said["refused"] > 40
    assert set(said["inherited"]) <= {"0", "1", "2", "3"}  # 3 is the listing's own
    # The same probe by the victim itself finds its own things: so it can find some.
    assert "its environment" in json.loads(cluster.run("ben", f"{PYTHON} {probe} '{json.dumps(told)}'").stdout)["got"]
    cluster.phalanx("ben", "cancel", victim)


def test_outputs_and_uploads_travel_between_an_account_and_the_head(cluster):
    folder = cluster.home("ada") / "project"
    folder.mkdir()
    (folder / "data").write_text("of ada\n")
    for path in (folder, folder / "data"):
        os.chown(path, ACCOUNTS["ada"], ACCOUNTS["ada"])
    said = cluster.phalanx(
        "ada",
        "run",
        "--gpus",
        "1",
        "--copy",
        "--",
        "sh",
        "-c",
        "cat data; ls -ln data; cp data $PHALANX_OUTPUT_DIR/back",
        cwd=folder,
    )
    assert "of ada" in said.stdout
    assert str(ACCOUNTS["ada"]) in said.stdout
    job = re.findall(r"job (\d+)", said.stderr)[0]
    cluster.phalanx("ada", "get", job, str(cluster.root / "got"))
    assert (cluster.root / "got" / "back").read_text() == "of ada\n"


def test_setup_and_exec_and_its_terminal_are_the_accounts_too(cluster):
    shared = _shared(cluster)
    job = cluster.submit("ada", f"touch {shared}/up; exec sleep 600", "--setup", f"id -u > {shared}/setup")
    _until((shared / "up").exists, "ada's job")
    assert (shared / "setup").read_text().strip() == str(ACCOUNTS["ada"])
    assert cluster.phalanx("ada", "exec", job, "--", "id", "-u").stdout.strip() == str(ACCOUNTS["ada"])
    assert "typed" in cluster.phalanx("ada", "exec", job, "--", "cat", typed="typed\n").stdout
    on_terminal = cluster.phalanx(
        "ada", "exec", "-t", job, "--", "sh", "-c", 'stat -c %u "$(tty)"; echo seen > /dev/tty'
    ).stdout
    assert on_terminal.split() == [str(ACCOUNTS["ada"]), "seen"]
    cluster.phalanx("ada", "cancel", job)


def test_a_daemon_of_an_account_that_hides_from_everything_dies_with_its_job(cluster):
    shared = _shared(cluster)
    hidden = f"setsid env -i sh -c 'echo $$ > {shared}/daemon; exec sleep 600' < /dev/null > /dev/null 2>&1 &"
    job = cluster.submit("ada", f"{hidden} {hidden} sleep 600")
    pid = int(_until(lambda: (shared / "daemon").exists() and (shared / "daemon").read_text(), "the daemon"))
    cluster.phalanx("ada", "cancel", job)
    _until(lambda: cluster.state_of(job) == "cancelled", "the cancel")
    _until(lambda: not os.path.exists(f"/proc/{pid}"), "the daemon's end")


def test_a_job_that_fills_its_folder_with_links_leads_root_nowhere(cluster):
    """In the place of every file that root makes or reads there: what they name is as it was, and neither read nor sent."""
    secret = cluster.secret
    before = (secret.read_text(), secret.stat().st_mode, secret.stat().st_uid)
    names = [
        "page",
        "page.new",
        "reports",
        "hostfile",
        "setup-done",
        "requirements.json",
        "requirements.order",
        "image.log",
        "workdir",
        "workdir.new",
        "workdir.tar",
        "batch",
    ]
    links = "; ".join(f"rm -rf $at/{name}; ln -s {secret} $at/{name}" for name in names)
    shared = _shared(cluster)
    script = (
        f"at=$(dirname $PHALANX_LEASE_PAGE); {links}; ln -s {secret} $PHALANX_OUTPUT_DIR/link; ln -s /root $PHALANX_OUTPUT_DIR/folder; "
        f"mkfifo $PHALANX_OUTPUT_DIR/pipe; echo mine > $PHALANX_OUTPUT_DIR/file; rm -rf $PHALANX_CHECKPOINT_DIR; ln -s {cluster.state} $PHALANX_CHECKPOINT_DIR; "
        f"[ -e {shared}/again ] || {{ touch {shared}/again; kill -9 $$; }}"
    )  # the second time it is a restart in place, into the folder as it was left
    job = cluster.submit("ada", script, "--setup", "true")
    _until(lambda: cluster.state_of(job) not in {"pending", "running"}, "its end")
    assert (secret.read_text(), secret.stat().st_mode, secret.stat().st_uid) == before
    cluster.phalanx("ada", "get", job, str(cluster.root / "linked"))
    found = {path.relative_to(cluster.root / "linked").as_posix() for path in (cluster.root / "linked").rglob("*")}
    assert found == {"file"}
    assert (cluster.state / "token").exists()
    assert cluster.run("ada", "echo on").stdout == "on\n"  # the supervisor lives


def test_checkpoints_of_another_account_are_out_of_reach_of_a_path_in_the_job(cluster):
    done = cluster.run("ada", "true", "--checkpoint", str(cluster.home("ben") / "ck"), check=False)
    assert "cannot be created" in done.stderr
    assert not (cluster.home("ben") / "ck").exists()
    assert cluster.run(
        "ada", "stat -c %U $PHALANX_CHECKPOINT_DIR", "--checkpoint", str(cluster.home("ada") / "ck")
    ).stdout.strip() in {"ada", "61001"}
