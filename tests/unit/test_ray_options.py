"""What is refused of `up --engine ray` and of a server that joins it, before anything is written or started."""

import importlib.util
import socket
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from phalanx.app.options import parse_arguments, resolve_options
from phalanx.app.state_folder import StateFolder
from phalanx.core.errors import BadRequest, Conflict, Unreachable
from phalanx.engines.ray import head_setup, joined_node, redis
from phalanx.engines.ray.cluster import why_silent
from phalanx.engines.ray.engine_type import RayEngineType
from phalanx.engines.ray.protocol import RayJoin
from phalanx.ports.engine import HeadSetup

SETUP = HeadSetup(listens=False, listened_before=False, shares_store=False, virtual="")


def checked(previous=None, **given):
    """The options in use; of Ray by default."""
    words = {f"ray-{name}": value for name, value in given.items()}
    return RayEngineType().check(words, previous, SETUP)


def options(address="", redis=""):
    return {"ray-address": address, "ray-redis": redis}


def ray_is(monkeypatch, version):
    monkeypatch.setattr(joined_node, "ray_version", lambda: version)


@pytest.mark.parametrize("words", [("--ray-address", "10.0.0.1:6379"), ("--ray-redis", "10.0.0.2:6379")])
def test_an_option_of_ray_without_ray_is_refused(tmp_path, words):
    with pytest.raises(BadRequest, match=f"{words[0]} needs the engine Ray"):
        resolve_options(parse_arguments([*words]), StateFolder.open(str(tmp_path)), 0)


def test_a_missing_ray_is_told_in_one_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadRequest, match="Ray is not installed here") as refused:
        checked()
    assert "pip install" in refused.value.hint


def test_another_release_of_ray_is_refused(monkeypatch):
    ray_is(monkeypatch, "2.9.1")
    with pytest.raises(BadRequest, match=r"Ray 2\.9\.1 is installed"):
        checked()


def test_a_ray_head_that_does_not_listen_is_told(monkeypatch):
    ray_is(monkeypatch, "2.60.0")
    with pytest.raises(Unreachable, match=r"no Ray head listens at 127\.0\.0\.2:9"):
        checked(address="127.0.0.2:9")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (bytes((0, 0, 6, 4, 0, 0, 0, 0, 0)) + bytes(6), ""),  # SETTINGS, as a gRPC server sends it first
        (b"HTTP/1.1 400 Bad Request\r\n", "is no Ray head: it answers b'HTTP/1.1 400 Bad'"),
        (b"", "closes the connection without an answer; it is no Ray head, or it needs TLS"),
        (None, "nothing answers at"),
    ],
)
def test_a_dead_ray_head_is_told_without_a_driver(answer, said):
    with socket.create_server(("127.0.0.1", 0)) as server:
        ended = threading.Event()

        def serve():
            client, _ = server.accept()
            with client:
                client.recv(1 << 10)
                if answer is None:
                    ended.wait(10)
                elif answer:
                    client.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        limit_s = 0.2 if answer is None else 10.0
        found = why_silent(f"127.0.0.1:{server.getsockname()[1]}", tls=False, timeout_s=limit_s)
        ended.set()
        thread.join()
    assert said in found
    assert bool(found) == bool(said)


def test_the_address_of_before_is_kept_until_another_is_given(monkeypatch):
    ray_is(monkeypatch, "2.60.0")
    monkeypatch.setattr(head_setup, "_check_driver_connects", lambda address: None)
    before = options("10.0.0.1:6379")
    assert checked(before) == before
    assert checked(before, address="own") == options()
    assert checked() == options()


def test_redis_is_remembered_until_it_is_off_and_is_of_our_own_ray_alone(monkeypatch):
    ray_is(monkeypatch, "2.60.0")
    monkeypatch.setattr(redis, "check", lambda address: None)
    monkeypatch.setattr(head_setup, "_check_driver_connects", lambda address: None)
    before = options(redis="10.0.0.2:6379")
    assert checked(before) == before
    assert checked(before, redis="off") == options()
    assert checked(before, address="10.0.0.1:6379") == options("10.0.0.1:6379")
    with pytest.raises(BadRequest, match="--ray-redis is for a Ray cluster of our own"):
        checked(address="10.0.0.1:6379", redis="10.0.0.2:6379")


def test_an_own_cluster_is_refused_to_a_head_that_shares_its_store(monkeypatch):
    ray_is(monkeypatch, "2.60.0")
    with pytest.raises(Conflict, match="ends with that head"):
        RayEngineType().check({}, None, replace(SETUP, shares_store=True))


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


@pytest.mark.slow
def test_a_head_does_not_import_ray_nor_cryptography_for_nothing():
    code = "import sys, phalanx.app.head; print(sorted({'ray', 'cryptography'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
