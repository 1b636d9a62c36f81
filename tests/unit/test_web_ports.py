"""Ports of web programs in job files: what they may say, and their paths at the head."""

import pytest

from phalanx.core.errors import BadRequest
from phalanx.core.ids import JobId
from phalanx.core.work.job_file.keys import InvalidKey
from phalanx.core.work.job_file.request import spec_from_mapping
from phalanx.core.work.job_file.web_ports import PORTS_MAX, WebPort, parse_web_ports, web_path


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (8888, (WebPort(port=8888),)),
        ("8888,board=6006", (WebPort(port=8888), WebPort(name="board", port=6006))),
        ([8888, "board=6006"], (WebPort(port=8888), WebPort(name="board", port=6006))),
        ({"jupyter": 8888, "board": "6006"}, (WebPort(name="jupyter", port=8888), WebPort(name="board", port=6006))),
        (["lab=8888:keep-path"], (WebPort(name="lab", port=8888, keep_path=True),)),
    ],
)
def test_ports_are_a_list_or_names(value, found):
    assert parse_web_ports(value) == found


@pytest.mark.parametrize(
    "value",
    [
        0,
        65536,
        "",
        "http",
        "-1",
        True,
        None,
        "8888:8888",
        "8888:keep",
        ["=8888"],
        {"a b": 1},
        {"UP": 1},
        {"x/y": 80},
        {"a": None},
        [8888, 8888],
        ["a=1", "a=2"],
        {"a": [1]},
        list(range(1, PORTS_MAX + 2)),
        "8888,",
        "١",
        8888.5,
    ],
)
def test_other_values_are_refused(value):
    with pytest.raises(BadRequest, match=r"^ports: "):
        parse_web_ports(value)


def test_a_job_file_names_the_wrong_key():
    with pytest.raises(InvalidKey) as caught:
        spec_from_mapping({"run": "jupyter lab", "ports": {"jupyter": "x"}}, workdir="/w")
    assert caught.value.key == "ports"
    spec = spec_from_mapping({"run": "jupyter lab", "ports": {"jupyter": 8888}}, workdir="/w")
    assert spec.ports == (WebPort(name="jupyter", port=8888),)


def test_the_path_names_job_node_and_port():
    assert web_path(JobId("17"), 8888) == "/j/17/8888/"
    assert web_path(JobId("17_3"), 8888, 1) == "/j/17_3.1/8888/"
