"""Arrays and dependencies over HTTP: one submit, one key, one answer; all elements as one job; waiting ones folded in lists."""

import pytest

from phalanx.core.ids import JobId
from phalanx.core.work.states import JobState
from tests.contract.api_head import JOB, code

ARRAY = {**JOB, "array": "0-9%2", "hold": True}


def post(call, body=JOB, *, role="user", **more):
    return call(role, "POST", "/v1/jobs", {**body, **more})


def shown(call, job_id):
    return call("user", "GET", f"/v1/jobs/{job_id}").json()["job"]


def test_one_submit_makes_the_array_and_says_so(call):
    said = post(call, ARRAY).json()
    assert (said["array_id"], said["job"]["id"]) == ("1", "1_0")
    assert said["notes"][0] == "10 elements, 1_0 to 1_9, at most 2 at once; for each:"
    element = shown(call, "1_7")
    assert [element[key] for key in ("array_id", "array_index", "array_size", "array_max", "seq")] == ["1", 7, 10, 2, 8]


def test_one_key_makes_one_array(call):
    key = {"idempotency-key": "k"}
    first = call("user", "POST", "/v1/jobs", ARRAY, headers=key).json()
    again = call("user", "POST", "/v1/jobs", ARRAY, headers=key).json()
    assert (again["array_id"], again["job"]["id"]) == (first["array_id"], first["job"]["id"])
    assert len(call("user", "GET", "/v1/jobs").json()["jobs"]) == 10
    assert code(call("user", "POST", "/v1/jobs", {**ARRAY, "array": "0-8"}, headers=key)) == (409, "conflict")


def test_a_whole_array_is_shown_as_one_job(call):
    post(call, ARRAY)
    whole = shown(call, "1")
    assert (whole["id"], whole["state"], whole["states"], whole["elements"]) == ("1", "pending", {"pending": 10}, "0-9")
    call("user", "POST", "/v1/jobs/1_3/cancel", {})
    whole = shown(call, "1")
    assert (whole["state"], whole["states"]) == ("pending", {"pending": 9, "cancelled": 1})
    assert whole["detail"] == "9 pending, 1 cancelled; unsuccessful: 3"


def test_verbs_act_on_all_elements_and_are_harmless_twice(call):
    post(call, ARRAY)
    for verb, states in (
        ("release", {"pending": 10}),
        ("hold", {"pending": 10}),
        ("cancel", {"cancelled": 10}),
        ("cancel", {"cancelled": 10}),
    ):
        reply = call("user", "POST", f"/v1/jobs/1/{verb}", {} if verb == "cancel" else None)
        assert reply.status_code == 200, reply.text
        assert reply.json()["job"]["states"] == states
    assert shown(call, "1")["state"] == "cancelled"
    assert code(call("user", "POST", "/v1/jobs/1/hold")) == (404, "not_found")


def test_update_reaches_every_element(call):
    post(call, ARRAY)
    assert call("user", "PATCH", "/v1/jobs/1", {"priority": 9, "begin": "2h"}).status_code == 200
    jobs = call("user", "GET", "/v1/jobs").json()["jobs"]
    assert {job["priority"] for job in jobs} == {9}
    assert len({job["begin_s"] for job in jobs}) == 1


def test_several_jobs_and_arrays_end_in_one_call(call):
    post(call, ARRAY)
    plain = post(call, hold=True).json()["job"]["id"]
    reply = call("user", "POST", "/v1/jobs/cancel", {"jobs": ["1", plain]}).json()
    assert [(job["id"], job["state"]) for job in reply["jobs"]] == [("1", "cancelled"), (plain, "cancelled")]


def test_others_may_not_touch_an_array_and_one_element_must_be_meant_for_its_output(call):
    post(call, ARRAY)
    assert code(call("other", "POST", "/v1/jobs/1/cancel", {})) == (403, "not_permitted")
    for path in ("logs", "story", "receipt", "usage", "files", "steps"):
        reply = call("user", "GET", f"/v1/jobs/1/{path}")
        assert code(reply) == (400, "bad_request"), path
        assert "is an array of 10 elements" in reply.json()["error"]["message"]
        assert reply.json()["error"]["hint"] == "name one element, 1_0 to 1_9"
    assert call("user", "GET", "/v1/jobs/1_4/story").status_code == 200


@pytest.mark.parametrize("name", ["2", "10", "1_10", "01", "1_", "99999999999999999999", "²"])
def test_a_number_within_an_array_is_no_job(call, name):
    post(call, ARRAY)
    assert code(call("user", "GET", f"/v1/jobs/{name}")) == (404, "not_found")


def test_a_folded_list_has_one_entry_for_the_waiting_elements(call):
    before = post(call, hold=True).json()["job"]["id"]
    post(call, ARRAY)
    after = post(call, hold=True).json()["job"]["id"]
    call("user", "POST", "/v1/jobs/2_0/cancel", {})
    call("user", "POST", "/v1/jobs/2_5/cancel", {})
    listed = call("user", "GET", "/v1/jobs?fold=1").json()["jobs"]
    assert [(job["id"], job.get("elements", "")) for job in listed] == [
        (after, ""),
        ("2_9", "1-4,6-9"),
        ("2_5", "0,5"),
        (before, ""),
    ]
    whole = call("user", "GET", "/v1/jobs/2").json()["job"]
    assert whole["state_elements"] == {"pending": "1-4,6-9", "cancelled": "0,5"}


def test_ended_jobs_are_found_by_their_end(call):
    for _ in range(2):
        post(call, hold=True)
    call("user", "POST", "/v1/jobs/1/cancel", {})
    ended_s = call("user", "GET", "/v1/jobs/1").json()["job"]["ended_s"]
    for since_s, ids in ((ended_s, ["1"]), (ended_s + 1e-3, [])):
        for fold in (0, 1):
            listed = call("user", "GET", f"/v1/jobs?ended_since_s={since_s!r}&fold={fold}").json()["jobs"]
            assert [job["id"] for job in listed] == ids
    assert code(call("user", "GET", "/v1/jobs?ended_since_s=nan"))[0] == 400


def test_pages_of_a_folded_list_hold_everything_once(call):
    post(call, ARRAY)
    post(call, hold=True)
    post(call, {**ARRAY, "array": "0-4"})
    for index in (1, 2, 7):
        call("user", "POST", f"/v1/jobs/1_{index}/cancel", {})
    for limit in (1, 2, 3, 7):
        found, before = [], ""
        while True:
            page = call("user", "GET", f"/v1/jobs?fold=1&limit={limit}{before}").json()
            assert len(page["jobs"]) <= limit
            found += [job["id"] for job in page["jobs"]]
            if page["next"] is None:
                break
            before = f"&before_seq={page['next']}"
        others = [job for job in found if job not in ("1_9", "1_8", "1_6", "1_5", "1_4", "1_3", "1_0")]
        assert others == ["12_4", "11", "1_7"], limit


def test_a_parent_that_left_the_memory_long_ago_still_counts(head, call):
    """The head forgets ended jobs; the API asks the store for it."""
    post(call, {**ARRAY, "array": "0-2"})
    call("user", "POST", "/v1/jobs/1/cancel", {})
    for job_id in ("1_0", "1_1", "1_2"):
        head.driver.controller.world.jobs.pop(JobId(job_id))
    assert post(call, depends_on="afterany:1", hold=True).json()["job"]["state"] == "pending"
    said = post(call, depends_on="1").json()["job"]
    assert (said["state"], said["detail"]) == ("cancelled", "job 1_0 was cancelled, so afterok:1 can never be met")
    assert head.store.job(JobId(said["id"])).state is JobState.CANCELLED


def test_unknown_parent_is_404_and_named(call):
    reply = post(call, depends_on=["afterok:7"])
    assert code(reply) == (404, "not_found")
    assert reply.json()["error"]["message"] == "depends_on: job 7 does not exist"


def test_what_a_job_waits_for_is_in_its_view(call):
    parent = post(call, hold=True).json()["job"]["id"]
    child = post(call, depends_on=[int(parent), "singleton"], begin="2030-01-01T00:00Z").json()["job"]
    assert child["unmet"] == [f"afterok:{parent}", "singleton"]
    assert (child["reason"], child["begin_s"]) == ("dependency", 1_893_456_000.0)


def test_anothers_job_may_be_waited_for_by_whom_it_is_shown_to(call):
    parent = post(call, hold=True).json()["job"]["id"]
    assert post(call, role="other", depends_on=parent, hold=True).status_code == 201
    token = call("other", "POST", "/v1/tokens", {"scope": ["submit"]}).json()["secret"]
    assert code(call(token, "POST", "/v1/jobs", {**JOB, "depends_on": parent})) == (
        403,
        "not_permitted",
    )


@pytest.mark.parametrize(
    "bad",
    [{"array": "0-99999"}, {"array": "x"}, {"begin": "soon"}, {"begin": "2026-01-01T08:00"}, {"depends_on": "after"}],
)
def test_what_cannot_be_read_is_refused(call, bad):
    assert code(post(call, **bad)) == (422, "bad_file")
