"""What an operator reads if a cloud refuses: wrong keys, a missing right, no quota, an unknown zone, a cap of 0. Each is one line that says what to
do next, nothing is created, and the cloud is not called again and again.

Real heads over HTTP: AWS is moto's server, which checks signatures and policies; Google and Azure are the servers of `benchmarks.clouds`.
"""

import time

import pytest

from benchmarks.clouds.campaign_clouds import MOTO
from benchmarks.cluster import free_port
from tests.cloud_accounts import open_account
from tests.e2e.test_cli_head import Shell

pytestmark = [
    pytest.mark.prove,
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not MOTO.exists(), reason="moto is not installed: make s3-tools"),
]
SEEN_S = 60.0  # a guard: until the head has shown a refusal
QUIET_S = 12.0  # watched after it
CALLS_MOST = 16  # in that time: two stops, repeated after 1, 2, 4 and 8 s, each up to two calls


@pytest.fixture(scope="module", params=["aws", "azure", "google"])
def account(request, tmp_path_factory):
    with open_account(request.param, tmp_path_factory.mktemp(request.param)) as made:
        yield made


@pytest.fixture(scope="module")
def phalanx(account, tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("home"))
    shell.env.update(account.environment)
    shell("up", "--virtual", "1x1", "--port", str(free_port()), "--listen", f"127.0.0.2:{free_port()}")
    yield shell
    shell("down", "--cancel-jobs")


@pytest.fixture(autouse=True)
def nothing_is_created(account):
    account.restore()
    yield
    account.restore()
    assert account.machines() == []


def settings(account, more=()):
    return [word for one in (*account.settings, *more) for word in ("--set", one)]


def add(phalanx, account, name, *words, zone="", more=(), code=0):
    given = ("--type", account.kind, "--zones", zone or account.zone, "--max", "2", "--price", "1/h")
    return phalanx(
        "pools", "add", name, "--provider", account.name, *given, *settings(account, more), *words, code=code
    )


def the_line(done):
    """The one line of an error."""
    (line,) = done.stderr.splitlines()
    assert line.startswith("phalanx: error: ")
    assert len(line) < 400
    return line


def refused(phalanx, account, *words, **more):
    starts = account.starts()
    line = the_line(add(phalanx, account, "refused", *words, code=64, **more))
    assert account.starts() == starts
    assert [pool["id"] for pool in phalanx.json("pools") if pool["id"] == "refused"] == []
    return line


def test_keys_that_are_wrong_are_one_line_of_add_and_check(phalanx, account):
    if not account.wrong_keys:
        account.spoil_keys()
    checked = the_line(phalanx("clouds", "check", account.name, *settings(account, account.wrong_keys), code=64))
    for line in (refused(phalanx, account, more=account.wrong_keys), checked):
        assert "does not accept the credentials: " in line
        assert "where the head starts)" in line
        assert not set("{}[]'") & set(line), "words, not a value of Python"


def test_a_right_that_is_missing_is_named_by_add_and_check(phalanx, account):
    account.take_right()
    line = refused(phalanx, account)
    assert account.right in line
    assert line.endswith(f"(phalanx clouds check {account.name})")
    checked = phalanx("clouds", "check", account.name, *settings(account)).stdout
    assert f"missing: {account.right}; the least policy:" in checked
    assert account.right in checked.partition("the least policy:")[2]


def test_a_zone_that_is_unknown_is_one_line_with_those_that_exist(phalanx, account):
    line = refused(phalanx, account, zone=account.wrong_zone)
    assert account.wrong_zone in line
    assert account.zone in line.partition("(")[2]


def test_a_cap_of_0_allows_no_node(phalanx, account):
    line = refused(phalanx, account, "--cap", "0/h")
    assert "a cap of $0 an hour allows no node: the cheapest costs $1 an hour (raise the cap to 1 or more)" in line
    calls = account.calls()
    add(phalanx, account, "capped", "--month-cap", "0")
    asked = account.calls()
    assert asked > calls
    job = the_line(phalanx("submit", "--gpus", "2x1", "--", "true", code=64))
    assert "pool capped orders no node: its cap allows none" in job
    assert "$0 a month at most: no node is ordered" in phalanx("pools", "show", "capped").stdout
    phalanx("pools", "remove", "capped")


@pytest.mark.parametrize("lacking", ["keys", "right", "quota"])
def test_a_job_that_waits_for_such_a_pool_says_why_and_the_cloud_is_left_in_peace(phalanx, account, lacking):
    name = f"pool-{lacking}"
    add(phalanx, account, name, more=account.doomed_keys if lacking == "keys" else ())
    {"keys": account.spoil_keys, "right": account.take_right, "quota": account.end_quota}[lacking]()
    starts = account.starts()
    job = phalanx("submit", "--quiet", "--gpus", "2x1", "--", "true").stdout.strip()
    until_s = time.monotonic() + SEEN_S
    while f"pool {name} tries again in" not in (why := phalanx("why", job).stdout):
        assert time.monotonic() < until_s, why
        time.sleep(0.3)
    words = {
        "keys": ("does not accept the credentials: ", "where the head starts)"),
        "right": (account.right, f"(phalanx clouds check {account.name})"),
        "quota": (account.quota_code, "no offer is left to try"),
    }[lacking]
    shown = phalanx("pools", "show", name).stdout
    for text in (why.splitlines()[0], next(line for line in shown.splitlines() if "given up in a row" in line)):
        assert all(word in text for word in words), text
        assert text.count(words[0]) == 1, text
    calls = account.calls()
    time.sleep(QUIET_S)
    assert account.starts() - starts <= 2, "one for each node"
    assert account.calls() - calls <= CALLS_MOST
    assert account.machines() == []
    phalanx("cancel", job)
    phalanx("pools", "remove", name)
