"""What is refused of `up --engine ray` and of a server that joins it, before anything is written or started."""

import argparse
import importlib.util
import subprocess
import sys

import pytest

from phalanx.app import ray_setup as app_ray
from phalanx.app.ray_setup import RayOptions, ray_options
from phalanx.core.errors import BadRequest, Unreachable
from phalanx.engines.ray import joined_node, redis
from phalanx.wire.join import RayJoin


def given(ray_address=None, ray_redis=None):
    return argparse.Namespace(ray_address=ray_address, ray_redis=ray_redis)


def ray_is(monkeypatch, version):
    monkeypatch.setattr(app_ray, "ray_version", lambda: version)
    monkeypatch.setattr(joined_node, "ray_version", lambda: version)


def test_an_option_of_ray_without_ray_is_refused():
    assert ray_options("local", given(), {}) is None
    with pytest.raises(BadRequest, match="--ray-address needs the engine Ray"):
        ray_options("local", given("10.0.0.1:6379"), {})


def test_a_missing_ray_is_told_in_one_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadRequest, match="Ray is not installed here") as refused:
        ray_options("ray", given(), {})
    assert "pip install" in refused.value.hint


def test_another_release_of_ray_is_refused(monkeypatch):
    ray_is(monkeypatch, "2.9.1")
    with pytest.raises(BadRequest, match=r"Ray 2\.9\.1 is installed"):
        ray_options("ray", given(), {})


def test_a_ray_head_that_does_not_listen_is_told(monkeypatch):
    ray_is(monkeypatch, "2.60.0")
    with pytest.raises(Unreachable, match=r"no Ray head listens at 127\.0\.0\.2:9"):
        ray_options("ray", given("127.0.0.2:9"), {})


def test_the_address_of_before_is_kept_until_another_is_given(monkeypatch):
    ray_is(monkeypatch, "2.60.0")
    monkeypatch.setattr(app_ray, "_check_driver_connects", lambda address: None)
    before = {"ray": {"address": "10.0.0.1:6379"}}
    assert ray_options("ray", given(), before) == RayOptions(address="10.0.0.1:6379")
    assert ray_options("ray", given("own"), before) == RayOptions(address="")
    assert ray_options("ray", given(), {"ray": None}) == RayOptions(address="")


def test_redis_is_remembered_until_it_is_off_and_is_of_our_own_ray_alone(monkeypatch):
    ray_is(monkeypatch, "2.60.0")
    monkeypatch.setattr(redis, "check", lambda address: None)
    monkeypatch.setattr(app_ray, "_check_driver_connects", lambda address: None)
    before = {"ray": {"address": "", "redis": "10.0.0.2:6379"}}
    assert ray_options("ray", given(), before) == RayOptions(redis="10.0.0.2:6379")
    assert ray_options("ray", given(ray_redis="off"), before) == RayOptions()
    assert ray_options("ray", given("10.0.0.1:6379"), before) == RayOptions(address="10.0.0.1:6379")
    with pytest.raises(BadRequest, match="--ray-redis is for a Ray cluster of our own"):
        ray_options("ray", given("10.0.0.1:6379", "10.0.0.2:6379"), {})
    with pytest.raises(BadRequest, match="--ray-redis needs the engine Ray"):
        ray_options("local", given(ray_redis="10.0.0.2:6379"), {})


def test_a_server_with_another_ray_or_python_does_not_join(monkeypatch):
    ray_is(monkeypatch, "2.60.0")
    of_head = RayJoin(
        address="a:1",
        token="t",
        key_pem="k",
        certificate_pem="c",
        ray_version="2.60.0",
        python_version=joined_node.python_version(),
    )
    joined_node.check_versions(of_head)
    ray_is(monkeypatch, "2.59.0")
    with pytest.raises(BadRequest, match=r"the head runs Ray 2\.60\.0 .* this server Ray 2\.59\.0"):
        joined_node.check_versions(of_head)


def test_a_head_does_not_import_ray_nor_cryptography_for_nothing():
    code = "import sys, phalanx.app.head; print(sorted({'ray', 'cryptography'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
