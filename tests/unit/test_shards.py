"""The lists of `tests/shards.py` and the table of invariants name tests that exist, and nothing is left out of both `make test` and `make prove`."""

import ast
import re
from functools import cache

import pytest

from tests import shards

PAGE = shards.ROOT / "docs" / "testing.md"
INVARIANTS = range(1, 28)


@cache
def names_in(path: str) -> dict[str, bool]:
    """Name of each test of a file, and whether it is marked `prove`."""
    tree = ast.parse((shards.ROOT / path).read_text(encoding="utf-8"))
    whole = any(isinstance(node, ast.Assign) and "pytest.mark.prove" in ast.unparse(node) for node in tree.body)
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            found[node.name] = whole or any("mark.prove" in ast.unparse(each) for each in node.decorator_list)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = whole  # a state machine of hypothesis
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            found[node.name] = whole
    return found


def files() -> list[str]:
    return sorted(str(path.relative_to(shards.ROOT)) for path in (shards.ROOT / "tests").rglob("test_*.py"))


def every_test() -> list[str]:
    return [f"{path}::{name}" for path in files() for name in names_in(path) if name.startswith(("test_", "Test"))]


def named() -> list[str]:
    lists = (shards.CAMPAIGNS, [one.tests for one in shards.SAMPLES], *(shard.tests for shard in shards.SHARDS))
    return sorted({prefix for each in lists for prefix in each})


@pytest.mark.slow
def test_every_prefix_names_a_test_that_exists():
    known = every_test()
    assert [one for one in named() if not any(node.startswith(one.partition("[")[0]) for node in known)] == []


def test_what_make_test_leaves_out_is_in_a_shard():
    left_out = [
        node
        for node in every_test()
        if node.startswith(shards.CAMPAIGNS) or names_in(node.split("::")[0])[node.split("::")[1]]
    ]
    left_out += [one.tests.partition("[")[0] for one in shards.SAMPLES]
    in_shards = tuple(prefix for shard in shards.SHARDS for prefix in shard.tests)
    assert [node for node in left_out if not node.startswith(in_shards)] == []


def test_each_invariant_has_a_test_of_make_test():
    rows = re.findall(r"^\| (\d+) \| .+ \| `([^`]+)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(INVARIANTS)
    for _, node in rows:
        path, _, name = node.partition("::")
        assert not node.startswith(shards.CAMPAIGNS), node
        assert names_in(path), node
        assert not name or names_in(path)[name] is False, node


def test_samples_spread_over_first_and_last():
    assert shards.spread(10, 3) == {0, 4, 9}
    assert shards.spread(2, 5) == {0, 1}
    assert shards.spread(7, 1) == {0}
    nodes = [f"tests/contract/test_store_crash.py::test_blobs_survive_a_kill[{number}]" for number in range(28)]
    assert len(set(nodes) - shards.left_out(nodes)) == 3


def test_the_draw_takes_a_shard_whose_code_changed_and_always_the_same_for_a_commit():
    slurm = next(number for number, shard in enumerate(shards.SHARDS, 1) if shard.sources[0] == "engines/slurm")
    drawn = {shards.draw(str(commit), ["src/phalanx/engines/slurm/engine.py"]) for commit in range(300)}
    assert slurm in drawn
    assert 1 not in drawn, "a kill of heads has nothing to do with Slurm"
    assert shards.draw("abc", []) == shards.draw("abc", [])
    folders = {source for shard in shards.SHARDS for source in shard.sources}
    package = shards.ROOT / "src" / "phalanx"
    assert [one for one in folders if not (package / one).exists() and not (package / f"{one}.py").exists()] == []
