"""Whose history speaks for a job, and how much of it is kept."""

import pytest

from phalanx.core.scheduling import job_classes
from phalanx.core.scheduling.estimates.hazard_table import HazardTable
from phalanx.core.scheduling.job_classes import JobClassRegistry
from tests.builders import job


@pytest.fixture(autouse=True)
def three_names(monkeypatch):
    monkeypatch.setattr(job_classes, "STATISTICS_NAMES_MAX", 3)


def test_name_speaks_for_itself_once_it_has_ended():
    labels = JobClassRegistry()
    of_anna = labels.label(job(name="a"))
    assert labels.label(job(name="b")) == of_anna
    labels.record_end(job(name="a"))
    assert labels.label(job(name="a")) != of_anna
    assert labels.label(job(name="b")) == of_anna


def test_name_that_has_not_ended_for_longest_is_forgotten_with_what_it_told():
    labels, table = JobClassRegistry(), HazardTable()
    for name in ("a", "b", "c", "a"):
        labels.record_end(job(name=name))
    told = {name: labels.label(job(name=name)) for name in ("a", "b", "c")}
    groups = {name: table.group(label, 1) for name, label in told.items()}
    assert labels.record_end(job(name="d")) == told["b"]
    table.drop_label(told["b"])
    assert list(table.groups()) == [groups["a"], groups["c"]]
    assert {name: labels.label(job(name=name)) for name in ("a", "c")} == {"a": told["a"], "c": told["c"]}
    assert labels.label(job(name="d")) == told["b"], "its number serves the next name"
    assert labels.label(job(name="b")) not in told.values(), "the name's owner speaks for it again"
    assert table.group(told["b"], 1) is not groups["b"]


def test_names_that_never_come_again_keep_the_table_small():
    labels, table = JobClassRegistry(), HazardTable()
    for number in range(1000):
        one = job(name=f"run-{number}")
        for _ in range(2):
            table.group(labels.label(one), 1)
            forgotten = labels.record_end(one)
            if forgotten is not None:
                table.drop_label(forgotten)
    assert len(list(table.groups())) <= 5
    assert max(labels.label(job(name=f"run-{number}")) for number in range(1000)) <= 5
