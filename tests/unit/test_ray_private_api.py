"""Ray's private functions: the engine names the one that the installed Ray lacks."""

import logging
import subprocess
import sys
from types import ModuleType

import pytest

from phalanx.engines.ray import private_api, redis


@pytest.fixture
def ray(monkeypatch):
    """Installs an empty Ray 3.0.0."""
    modules = {
        name: ModuleType(name) for name in ("ray", "ray._private", "ray._private.state", "ray._private.gcs_utils")
    }
    setattr(modules["ray"], "__version__", "3.0.0")  # a module has no such attribute for mypy
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    return modules


def test_free_gpus_are_those_of_the_node(ray):
    ray["ray._private.state"].available_resources_per_node = lambda: {"a": {"GPU": 3.0, "CPU": 8.0}, "b": {"CPU": 8.0}}
    assert [private_api.free_gpus(node) for node in ("a", "b", "gone")] == [3.0, 0.0, 0.0]


def test_a_redis_namespace_is_deleted_by_ray(ray):
    deleted = []
    ray["ray._private.gcs_utils"].cleanup_redis_storage = lambda **given: deleted.append(given)
    private_api.delete_redis_namespace("10.0.0.2", 6379, "phalanx")
    wanted = {"host": "10.0.0.2", "port": 6379, "password": "", "use_ssl": False, "storage_namespace": "phalanx"}
    assert deleted == [wanted]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: private_api.free_gpus("a"), "state.available_resources_per_node"),
        (lambda: private_api.delete_redis_namespace("h", 1, "n"), "gcs_utils.cleanup_redis_storage"),
    ],
)
@pytest.mark.parametrize("missing", ["function", "module"])
@pytest.mark.usefixtures("ray")
def test_a_ray_without_the_function_is_named_with_its_version(monkeypatch, call, name, missing):
    if missing == "module":
        monkeypatch.setitem(sys.modules, "ray._private", ModuleType("ray._private"))
        monkeypatch.delitem(sys.modules, f"ray._private.{name.partition('.')[0]}")
    with pytest.raises(RuntimeError, match=rf"Ray 3\.0\.0 has no ray\._private\.{name}; install .*ray==2\.60"):
        call()


def test_data_left_in_redis_is_logged_with_the_reason(monkeypatch, caplog):
    def fail(command, **_):
        raise subprocess.CalledProcessError(1, command, stderr="Traceback ...\nRuntimeError: Ray 3.0.0 has no x\n")

    monkeypatch.setattr(subprocess, "run", fail)
    with caplog.at_level(logging.WARNING):
        redis.delete_data("10.0.0.2:6379", "phalanx", {})
    assert "10.0.0.2:6379, namespace phalanx: RuntimeError: Ray 3.0.0 has no x" in caplog.text
