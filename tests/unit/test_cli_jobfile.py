"""Job files: YAML 1.2, every refusal with its line, nothing that can hold the reader up."""

import os
import time

import pytest

from phalanx.cli.jobs.request.job_file import parse_job_file, read_job_file
from phalanx.core.errors import BadFile, PhalanxError, TooLarge


def parsed(text):
    return parse_job_file(text, path="job.yaml")


def refused(text):
    with pytest.raises(BadFile) as caught:
        parsed(text)
    return caught.value


def test_words_stay_as_typed():
    file = parsed(
        "name: 007\nrun: python train.py\ntime: 2:00:00\ngpus: 2x8\nenv:\n  A: 1.10\n  B: no\n  C:\nhold: true\npriority: -3\nsetup:\n"
    )
    assert file.mapping == {
        "name": "007",
        "run": "python train.py",
        "time": "2:00:00",
        "gpus": "2x8",
        "env": {"A": "1.10", "B": "no", "C": None},
        "hold": True,
        "priority": -3,
        "setup": None,
    }
    assert file.location("time") == "job.yaml:3"
    assert file.location("absent") == "job.yaml"


def test_json_is_yaml():
    assert parsed('{"run": ["python", "a b.py"], "nodes": 2}').mapping == {"run": ["python", "a b.py"], "nodes": 2}


def test_aliases_stand_for_what_they_name():
    assert parsed("run: [a, &x b, *x]\nenv: &e {A: 1}\nlabels: *e").mapping == {
        "run": ["a", "b", "b"],
        "env": {"A": "1"},
        "labels": {"A": "1"},
    }


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("run: a\ngpuz: 3", 2, "unknown key 'gpuz'"),
        ("run: a\n\nrun: b", 3, "run is defined twice, here and on line 1"),
        ("env:\n  A: 1\n  A: 2", 3, "A is defined twice"),
        ("run: [a\nb: c", 2, "not YAML"),
        ("run: a\n\tb: 3", 2, "not YAML"),
        ("run: a\n---\nrun: b", 2, "a job file has one document"),
        ("[a]", 1, "keys and values"),
        ("hold: yes", 1, "write true or false"),
        ("run: !!python/object:os.system x", 1, "tag"),
        ("run: *nothing", 1, "is not defined above"),
        ("run: &a [*a]", 1, "is not defined above"),
        ("<<: {a: b}", 1, "merge keys"),
        ("env: {<<: {a: b}}", 1, "merge keys"),
        ("? [a]\n: 1", 1, "must be a word"),
        ("gpus: [1]", 1, "one value"),
        ("env: {A: [1]}", 1, "env: A: expected one value"),
        ("run: a\ndepends_on: {17: ok}", 2, "expected one value, or a list"),
    ],
)
def test_a_refusal_says_its_line(text, line, words):
    error = refused(text)
    assert error.message.startswith(f"job.yaml:{line}: ")
    assert words in error.message
    assert error.exit_code == 78
    assert "\n" not in error.message


def test_nearest_key_is_named():
    assert refused("gpuz: 1").hint == "did you mean 'gpus'?"


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "\n\n"])
def test_a_file_that_holds_nothing_says_so(text):
    assert "empty file" in refused(text).message


def test_control_characters_are_no_yaml():
    assert "not YAML" in refused("run: \0").message


BOMBS = {
    "deep flow": "run: " + "[" * 500_000,
    "deep blocks": "- " * 300_000,
    "many values": "run: [" + "1," * 400_000 + "]",
    "many anchors": "run: [" + ",".join(f"&a{i} x" for i in range(60_000)) + "]",
    "laughs": "run: &a [x]\nsetup: &b [*a, *a]\nname: &c [*b, *b]",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_are_refused_before_they_grow(bomb):
    begun = time.monotonic()
    refused(BOMBS[bomb])
    assert time.monotonic() - begun < 30  # a hang guard: unbounded, the first takes minutes


def test_file_of_another_encoding_says_the_byte(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_bytes("run: echo ok\nname: caf\xe9\n".encode("latin-1"))
    with pytest.raises(BadFile, match=r"job.yaml:2: not UTF-8: byte 0xe9 at offset 22"):
        read_job_file(str(path))
    path.write_bytes("run: true\n".encode("utf-16"))
    with pytest.raises(BadFile, match="UTF-16"):
        read_job_file(str(path))
    path.write_bytes("\ufeffrun: true\n".encode())
    assert read_job_file(str(path)).mapping == {"run": "true"}


def test_ten_megabytes_are_refused_unread(tmp_path):
    path = tmp_path / "job.yaml"
    with open(path, "wb") as file:
        file.truncate(10 << 20)
    with pytest.raises(TooLarge, match=r"10\.0 MiB") as caught:
        read_job_file(str(path))
    assert caught.value.exit_code == 78


def test_no_file_a_folder_and_a_pipe_are_named(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing.yaml", ".", "pipe"):
        path = str(tmp_path / name)
        with pytest.raises(PhalanxError) as caught:
            read_job_file(path)
        assert path in caught.value.message
        assert caught.value.exit_code == 78
