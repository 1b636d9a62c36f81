"""What a state folder remembers of leases that outlive the head which granted them, and its boot."""

import json

from phalanx.app.home import Home
from phalanx.app.options import arguments, options_of


def test_longest_lease_that_was_granted_counts(tmp_path):
    home = Home.open(str(tmp_path))
    assert home.leases_until_s() == 0.0
    home.remember_leases(700.0)
    home.remember_leases(130.0)
    assert home.leases_until_s() == 700.0


def test_leases_of_another_boot_are_over(tmp_path):
    home = Home.open(str(tmp_path))
    home.write_private("planned_stop.json", json.dumps({"until_s": 700.0, "boot_id": "another"}))
    assert home.leases_until_s() == 0.0


def test_head_that_is_given_a_shorter_lease_still_knows_the_one_before(tmp_path):
    home = Home.open(str(tmp_path))
    assert options_of(arguments(["--lease", "5", "--virtual", "1x1"]), home, 0).lease_before_s == 0.0
    home.write_private("cluster.json", json.dumps({"lease_s": 60.0, "virtual": "1x1"}))
    options = options_of(arguments(["--lease", "5"]), home, 0)
    assert (options.lease_s, options.lease_before_s, options.remembered["lease_s"]) == (5.0, 60.0, 5.0)
