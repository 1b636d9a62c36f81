"""Saved clusters: which one a command uses, that their file is private, and that no token reaches another head."""

import json
import os
import stat

import pytest

from phalanx.cli.root import main
from phalanx.client.connection.clusters import (
    SavedCluster,
    SavedClusters,
    chosen_cluster,
    read_clusters,
    write_clusters,
)
from phalanx.client.connection.discovery import find_token, find_urls
from phalanx.core.errors import BadFile, BadRequest, NotFound, NotSignedIn

A = SavedCluster(name="a", url="https://a:7600,https://b:7600", token="token-of-a", user="ann")
B = SavedCluster(name="b", url="http://127.0.0.1:7601")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    for name in ("PHALANX_URL", "PHALANX_TOKEN", "PHALANX_HOME", "PHALANX_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")  # what `main` sets is taken back after the test
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def save(current=""):
    return write_clusters(SavedClusters(clusters={"a": A, "b": B}, current=current))


def test_file_is_for_its_owner_only_and_comes_back():
    path = save("a")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
    assert read_clusters() == SavedClusters(clusters={"a": A, "b": B}, current="a")
    assert "token-of-a" not in repr(read_clusters())


def test_named_cluster_goes_before_the_url_and_that_before_the_current_one(monkeypatch):
    save("a")
    assert find_urls() == ["https://a:7600", "https://b:7600"]
    assert find_token() == find_token(url="https://b:7600") == "token-of-a"
    monkeypatch.setenv("PHALANX_URL", "http://127.0.0.1:7777")
    monkeypatch.setenv("PHALANX_TOKEN", "token-of-the-url")
    assert (find_urls(), find_token()) == (["http://127.0.0.1:7777"], "token-of-the-url")
    monkeypatch.setenv("PHALANX_CLUSTER", "a")
    assert (find_urls()[0], find_token()) == ("https://a:7600", "token-of-a")
    monkeypatch.setenv("PHALANX_CLUSTER", "")
    assert find_urls() == ["http://127.0.0.1:7777"]


def test_token_of_the_environment_is_not_sent_to_a_cluster_that_is_named(monkeypatch):
    save()
    monkeypatch.setenv("PHALANX_TOKEN", "token-of-another-head")
    monkeypatch.setenv("PHALANX_CLUSTER", "b")
    with pytest.raises(NotSignedIn, match="no token for the cluster b"):
        find_token()


def test_state_folder_that_is_named_goes_before_the_current_cluster(monkeypatch, home):
    save("a")
    monkeypatch.setenv("PHALANX_HOME", str(home / "state"))
    assert chosen_cluster() is None
    monkeypatch.delenv("PHALANX_HOME")
    monkeypatch.setenv("PHALANX_CLUSTER", "gone")
    with pytest.raises(NotFound, match="no saved cluster 'gone'"):
        find_urls()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"clusters": [1]}', '{"clusters": {"a": {}}}', "\x00", '{"clusters": {"a": 1}}']
)
def test_damaged_file_is_named(text):
    path = save()
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    with pytest.raises(BadFile, match=r"clusters\.json"):
        read_clusters()


@pytest.mark.parametrize("name", ["", "-", "../a", "a b", "x" * 64, "é"])
def test_names_are_names(name):
    with pytest.raises(BadRequest, match="not a valid name"):
        SavedClusters(clusters={}).with_cluster(SavedCluster(name=name, url="http://127.0.0.1:1"))


def test_without_a_saved_cluster_use_says_how_to_save_one(capsys):
    assert main(["config", "use", "a"]) == 64
    assert "no saved cluster 'a' (none is saved; phalanx login URL saves one)" in capsys.readouterr().err


def test_config_lists_uses_shows_and_removes(capsys):
    save()
    assert main(["config", "use", "a"]) == 0
    assert main(["config", "--json"]) == 0
    out = capsys.readouterr().out
    assert "token-of-a" not in out
    listed = json.loads(out[out.index("[") :])
    assert [(one["cluster"], one["current"], one["token"]) for one in listed] == [
        ("a", True, "valid"),
        ("b", False, "none"),
    ]
    assert main(["config", "show"]) == 0
    assert "https://a:7600" in capsys.readouterr().out
    assert main(["config", "use", "-"]) == 0
    assert main(["config", "remove", "a"]) == 0
    assert read_clusters() == SavedClusters(clusters={"b": B})
    assert main(["config", "use", "a"]) == 64
    assert "no saved cluster 'a'" in capsys.readouterr().err
    assert main(["config", "use", ""]) == 64


def test_commands_of_this_machine_leave_the_current_cluster_alone(capsys):
    save("b")  # nothing answers there
    assert main(["down"]) == 0
    assert "no head runs here" in capsys.readouterr().out


def test_url_and_cluster_contradict_each_other(capsys):
    assert main(["--url", "http://127.0.0.1:1", "--cluster", "a", "ps"]) == 64
    assert "contradict" in capsys.readouterr().err
