"""The drill can fail: bugs planted one by one into the code under it, and each caught by the invariant that it breaks."""

import re
from pathlib import Path

import pytest

from phalanx.simulator.drill import run_seed
from tests.simulation.planted import BUGS, SEEDS_MORE

DRILL = Path(__file__).parents[2] / "docs" / "drill.md"
SAME_SEED = 25  # no single run can break it: the seed is played twice


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught_by_its_invariant(bug, monkeypatch):
    """Seed by seed until it is: a bug may break others of the design's promises as well, and those do not count."""
    bug.plant(monkeypatch)
    others = []
    for seed in range(bug.seed, bug.seed + 1 + SEEDS_MORE):
        invariant, said = first_broken(bug, seed)
        if invariant == bug.invariant:
            return
        others.append(f"seed {seed}: {invariant} {said}")
    pytest.fail(f"{bug.breaks} Invariant {bug.invariant} did not notice. " + "; ".join(others))


def test_without_them_the_same_seeds_are_clean():
    """So that it is the bug that was caught."""
    drilled = {(bug.seed, bug.events, bug.sqlite, bug.services, bug.mig, bug.resources, bug.pools): bug for bug in BUGS}
    clean = {drill: bug.run(bug.seed).violations for drill, bug in drilled.items()}
    assert not any(clean.values()), clean


def test_there_are_twenty_bugs_and_each_names_an_invariant_and_says_what_it_breaks():
    assert len(BUGS) >= 20
    assert len({bug.name for bug in BUGS}) == len(BUGS)
    assert all(bug.breaks.endswith(".") for bug in BUGS)


def test_the_page_of_the_drill_lists_just_these_bugs():
    text = DRILL.read_text(encoding="utf-8")
    rows = {tuple(row) for row in re.findall(r"^\| (\d+) \| `(\w+)` \| (.+) \| (.+) \|$", text, re.MULTILINE)}
    said = {False: "{0}", True: "{0}, {1:,} events"}
    assert rows == {
        (
            str(bug.invariant),
            bug.name,
            bug.breaks,
            said[bug.events != 600].format(bug.seed, bug.events)
            + (", services" if bug.services else "")
            + (", mig" if bug.mig else "")
            + (", resources" if bug.resources else "")
            + (", pools" if bug.pools else ""),
        )
        for bug in BUGS
    }
    assert f"\n{len(BUGS)} bugs are planted" in text


def test_a_supervisor_that_wakes_itself_for_ever_ends_the_drill(monkeypatch):
    """No invariant is looked at where time stands still, and nobody would ever hear of it."""
    monkeypatch.setattr("phalanx.node.logic.member.on_lease_expired", lambda member, _end_ns, _now: (member, []))
    found = run_seed(1, events=600).violations
    assert [one.invariant for one in found] == [0]
    assert "time does not advance" in found[0].text


def first_broken(bug, seed):
    """The invariant and what was said of it."""
    result = bug.run(seed)
    if result.violations:
        return result.violations[0].invariant, result.violations[0].text
    if bug.invariant == SAME_SEED and bug.run(seed).trace != result.trace:
        return SAME_SEED, f"seed {seed} has two traces"
    return None, "clean"
