"""Every policy keeps the contract of `phalanx.core.scheduling.policy`: the built-in ones, and the example of docs/add-a-policy.md."""

import re
import sys
from pathlib import Path

import pytest

from phalanx.controller.policy_loading import find_policy
from phalanx.core.errors import BadRequest
from phalanx.core.scheduling.policies import POLICIES
from phalanx.core.scheduling.settings import live_policy_settings
from phalanx.simulator.board_replay import replay_board
from phalanx.simulator.fleet import equal_nodes
from phalanx.simulator.trace import TraceJob
from tests.contract.policy_suite import check_policy

PAGE = Path(__file__).parents[2] / "docs" / "add-a-policy.md"


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The name of the example policy, on the path as the page says."""
    code = re.findall(r"```python\n(.+?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)[0]
    (tmp_path / "smallest.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield "smallest:SmallestFirst"
    sys.modules.pop("smallest", None)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_built_in_policy_keeps_the_contract(name):
    check_policy(POLICIES[name])


def test_the_example_of_the_page_keeps_the_contract_and_runs_live_and_in_the_simulator(example):
    make = find_policy(example)
    check_policy(make)
    assert type(live_policy_settings(example, make=make).create_policy()) is make
    jobs = [TraceJob(id=f"j{n}", submit_s=float(n), duration_s=10.0, gpus=4) for n in range(20)]
    assert len(replay_board(jobs, equal_nodes(1, 8), make).jobs) == 20


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere:Policy", "cannot be imported"),
        ("json:nothing", "cannot be imported"),
        ("json:JSONDecoder", "not a subclass"),
    ],
)
def test_what_is_no_policy_is_refused(name, why):
    with pytest.raises(BadRequest, match=why):
        find_policy(name)


def test_a_module_that_does_not_parse_is_refused(tmp_path, monkeypatch):
    (tmp_path / "unfinished.py").write_text("class Mine(", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BadRequest, match="cannot be imported"):
        find_policy("unfinished:Mine")
