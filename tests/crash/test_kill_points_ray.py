"""Kill -9 of a real head that brings Ray, at every place where it makes a folder, a file or a process for it: the next one serves, and no Ray
node runs that nobody knows. Half a minute each, so all of them are in `make prove`.
"""

import glob
import importlib.util
import json
import os
import shutil

import pytest

from phalanx.engines.local import records
from phalanx.engines.ray.cluster import session_folder
from phalanx.engines.ray.ray_process import sweep_ray
from tests.contract import engine_rigs
from tests.crash.armed_head import ArmedHead
from tests.crash.homes import Home, arming, killed_while_young, ways

pytestmark = [
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.prove,
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason=engine_rigs.WHY_NOT["ray"]()),
]


class RayHead(ArmedHead):
    """Its nodes are those that Ray's actors brought, and Ray's own processes are known to it as well."""

    def node_records(self):
        found = {}
        for path in glob.glob(f"{self.home}/ray-nodes/nodes/*/engine.json") + glob.glob(
            f"{self.home}/ray/*/engine.json"
        ):
            with open(path, encoding="utf-8") as file:
                found[os.path.relpath(path, self.home)] = json.load(file)
        return found

    def stop(self):
        ArmedHead.stop(self)
        for path in glob.glob(f"{self.home}/ray/*/engine.json"):
            living = records.read(os.path.dirname(path))
            if living is not None:
                sweep_ray(living)
        shutil.rmtree(session_folder(self.home), ignore_errors=True)


@pytest.mark.parametrize(("name", "failure", "nth"), ways(lambda name: name.startswith("ray.")))
def test_a_head_is_killed_while_it_brings_ray(name, failure, nth):
    home = Home.make(virtual="1x1", words=("--engine", "ray"), kind=RayHead)
    if name == "ray.mark.remove":  # what an earlier Ray head leaves
        os.makedirs(session_folder(home.head.home), exist_ok=True)
        with open(os.path.join(session_folder(home.head.home), "ray_current_cluster"), "w", encoding="ascii"):
            pass
    killed_while_young(home, arming(name, failure, nth), name=name)
