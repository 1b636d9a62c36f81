"""What Ray is told, word for word: golden files in tests/golden/ray. `PHALANX_GOLDEN=write` writes them anew."""

import json
import os
import sys
from pathlib import Path

import pytest

from phalanx.engines.ray import render
from phalanx.engines.ray.render import RayCredentials, RayStart

GOLDEN = Path(__file__).parents[1] / "golden" / "ray"
SECURED = RayCredentials(token="/h/ray/token", certificate="/h/tls/ray.pem", key="/h/tls/ray.key", ca="/h/tls/ca.pem")
PLAIN = RayCredentials(token="/h/ray/token")
GPUS = RayStart(name="gpu1", address="10.0.0.5", devices=8, virtual=False)
SLOTS = RayStart(name="n0", address="10.0.0.4", devices=2, virtual=True, temp="/tmp/phalanx-ray-0-abc")

DRAWN = {
    "head": lambda: render.head_command(SLOTS, 6379, 9801),
    "member-with-gpus": lambda: render.node_command(GPUS, "10.0.0.4:6379"),
    "environment-secured": lambda: render.ray_environment(SECURED),
    "environment-plain": lambda: render.ray_environment(PLAIN),
    "environment-of-another-ray": lambda: render.ray_environment(None),
    "actor": lambda: render.actor_options("gpu1", "965810833d8085a1c0308aeedacc4fc5", 8.0),
}


@pytest.mark.parametrize("name", DRAWN)
def test_it_is_as_drawn(name):
    text = json.dumps(DRAWN[name](), indent=1, sort_keys=True).replace(json.dumps(sys.executable), '"PYTHON"') + "\n"
    path = GOLDEN / f"{name}.json"
    if os.environ.get("PHALANX_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_every_process_of_ours_is_told_how_it_proves_itself_so_that_none_writes_a_token_file():
    for files in (SECURED, PLAIN):
        assert render.ray_environment(files)["RAY_AUTH_MODE"] == "token"


def test_ranks_grow_up_without_what_ray_put_there_for_its_own_worker():
    given = {
        "PATH": "/bin",
        "RAY_JOB_ID": "01",
        "CUDA_VISIBLE_DEVICES": "0",
        "PHALANX_NODE_KEY": "k",
        "HOME": "/root",
        "OMP_NUM_THREADS": "1",
    }
    assert render.without_ray_variables(given) == {"PATH": "/bin", "HOME": "/root"}


def test_an_actor_has_another_name_in_each_life_of_its_ray_node():
    assert render.actor_name("n0", "a" * 56) != render.actor_name("n0", "b" * 56)
