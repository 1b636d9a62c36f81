"""Dependencies: the grammar, and what each kind says of parents that are alive, succeeded or failed."""

import pytest

from phalanx.core.errors import BadRequest
from phalanx.core.lifecycle.dependencies import ConditionState, condition_state
from phalanx.core.work.dependency import (
    DEPENDENCIES_MAX,
    DependencyKind,
    describe_dependencies,
    parse_dependencies,
)
from phalanx.core.work.job_file.keys import InvalidKey
from phalanx.core.work.job_file.request import spec_from_mapping


@pytest.mark.parametrize(
    ("value", "drawn"),
    [
        (17, "afterok:17"),
        ("17", "afterok:17"),
        ("afterany:19:20", "afterany:19 afterany:20"),
        ("afterok:17,singleton", "afterok:17 singleton"),
        ([17, "afterok:18", "afterany:19:20", "singleton"], "afterok:17 afterok:18 afterany:19 afterany:20 singleton"),
        (["17", "afterok:17"], "afterok:17"),
        ("AfterNotOk:17_3", "afternotok:17_3"),
        ([], ""),
        ("", ""),
    ],
)
def test_conditions_as_written(value, drawn):
    assert " ".join(map(str, parse_dependencies(value))) == drawn


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("afterokay:17", "did you mean afterok?"),
        ("afterok", "needs a job number"),
        ("afterok:x", "is not a job number"),
        ("singleton:3", "singleton takes no job"),
        (True, "not a list of jobs"),
        ({"a": 1}, "not a list of jobs"),
        ([[1]], "is not a dependency"),
        ("afterok:17?afterok:18", "is not a job number"),
        (list(range(DEPENDENCIES_MAX + 1)), "more than"),
        ("²", "is not a dependency"),
    ],
)
def test_what_is_no_condition_is_refused(value, words):
    with pytest.raises(BadRequest) as refusal:
        parse_dependencies(value)
    assert words in refusal.value.message + refusal.value.hint


HOLDS, OPEN, NEVER = ConditionState.MET, ConditionState.OPEN, ConditionState.NEVER


@pytest.mark.parametrize(
    ("kind", "succeeded", "failed", "alive", "one_failed_others_live"),
    [
        ("afterok", HOLDS, NEVER, OPEN, NEVER),
        ("afterany", HOLDS, HOLDS, OPEN, OPEN),
        ("afternotok", NEVER, HOLDS, OPEN, OPEN),
        ("aftercorr", HOLDS, NEVER, OPEN, NEVER),
        ("singleton", HOLDS, HOLDS, OPEN, OPEN),
    ],
)
def test_verdict_table(kind, succeeded, failed, alive, one_failed_others_live):
    kind = DependencyKind(kind)
    assert condition_state(kind, alive=False, failed=False) is succeeded
    assert condition_state(kind, alive=False, failed=True) is failed
    assert condition_state(kind, alive=True, failed=False) is alive
    assert condition_state(kind, alive=True, failed=True) is one_failed_others_live


def test_a_sentence_names_three_and_counts_the_rest():
    assert describe_dependencies(()) == ""
    assert describe_dependencies(parse_dependencies("17")) == "waits for job 17 to succeed"
    told = describe_dependencies(parse_dependencies("1,afterany:2,afternotok:3,4,5"))
    assert told == "waits for job 1 to succeed and for job 2 to end and for job 3 to end without success and for 2 more"


def test_a_job_file_asks_for_all_of_it():
    given = {"run": "true", "depends_on": [17, "afterany:18"], "array": "0-9:3%2", "begin": "2026-12-01T08:00Z"}
    spec = spec_from_mapping(given, workdir="/w")
    assert (spec.array, spec.array_max, spec.begin_s) == ("0-9:3", 2, 1_796_112_000.0)
    assert [str(one) for one in spec.dependencies] == ["afterok:17", "afterany:18"]


def test_aftercorr_needs_an_array_of_its_own():
    with pytest.raises(InvalidKey, match="this job is not an array"):
        spec_from_mapping({"run": "true", "depends_on": "aftercorr:17"}, workdir="/w")
