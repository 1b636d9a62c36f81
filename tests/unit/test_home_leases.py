"""What a state folder remembers of leases that outlive the head which granted them, and its boot."""

import importlib.util
import json
from typing import Final

import pytest

from phalanx.app.options import parse_arguments, resolve_options
from phalanx.app.state_folder import StateFolder
from phalanx.controller.leadership import SUPERVISORS_LEASE_S
from phalanx.controller.leases import LEASE_DEFAULT_S

DSN: Final = "postgresql://ada@db/phalanx"


def test_longest_lease_that_was_granted_counts(tmp_path):
    home = StateFolder.open(str(tmp_path))
    assert home.long_leases_until_s() == 0.0
    home.record_long_leases(700.0)
    home.record_long_leases(130.0)
    assert home.long_leases_until_s() == 700.0


def test_leases_of_another_boot_are_over(tmp_path):
    home = StateFolder.open(str(tmp_path))
    home.write_private("planned_stop.json", json.dumps({"until_s": 700.0, "boot_id": "another"}))
    assert home.long_leases_until_s() == 0.0


def test_head_that_is_given_a_shorter_lease_still_knows_the_one_before(tmp_path):
    home = StateFolder.open(str(tmp_path))
    assert resolve_options(parse_arguments(["--lease", "5", "--virtual", "1x1"]), home, 0).previous_lease_s == 0.0
    home.write_private("cluster.json", json.dumps({"lease_s": 60.0, "virtual": "1x1"}))
    options = resolve_options(parse_arguments(["--lease", "5"]), home, 0)
    assert (options.lease_s, options.previous_lease_s, options.to_store["lease_s"]) == (5.0, 60.0, 5.0)


@pytest.mark.skipif(importlib.util.find_spec("psycopg") is None, reason="psycopg is not installed")
@pytest.mark.parametrize(
    ("remembered_s", "store_before", "given", "lease_s"),
    [
        (None, "", [], SUPERVISORS_LEASE_S),
        (LEASE_DEFAULT_S, "", [], SUPERVISORS_LEASE_S),  # the default of a head alone, which nobody chose
        (LEASE_DEFAULT_S, DSN, [], LEASE_DEFAULT_S),
        (20.0, "", [], 20.0),
        (LEASE_DEFAULT_S, "", ["--lease", "5"], 5.0),
    ],
)
def test_heads_that_take_turns_grant_leases_that_bear_it(
    tmp_path, monkeypatch, remembered_s, store_before, given, lease_s
):
    """Found by reading: a folder that moved to PostgreSQL kept the lease of a head alone, hardly longer than a takeover."""
    monkeypatch.setenv("PHALANX_STORE", DSN)
    home = StateFolder.open(str(tmp_path))
    if store_before:
        home.write_private("store", store_before)
    if remembered_s is not None:
        home.write_private("cluster.json", json.dumps({"lease_s": remembered_s, "virtual": "1x1"}))
    options = resolve_options(parse_arguments(["--virtual", "1x1", *given]), home, 0)
    assert options.lease_s == options.to_store["lease_s"] == lease_s
