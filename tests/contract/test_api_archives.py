"""Archives over HTTP: records of old jobs without files leave the store, month by month, and can still be read by those who could before."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, union-attr"

import calendar
import gzip
import time
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.api.auth.redaction import REDACTED
from phalanx.core.errors import Conflict
from phalanx.core.ids import JobId, UserId
from phalanx.core.state.events import RemoveArchivedJobs
from phalanx.core.work.dependency import ArrayPosition
from phalanx.core.work.job import PublishedCheckpoint
from phalanx.core.work.states import AttemptState, JobState
from phalanx.failpoints import FailureMode, arm
from phalanx.ports.store import Batch
from phalanx.store.job_archives import JobArchives, records_of
from phalanx.store.memory import MemoryStore
from tests.contract.api_head import JOB, ApiHead, until
from tests.contract.records import attempt, attempt_use, job, key, line

DAY_S = 86_400.0
IN_MEMORY = 1000  # the newest ended jobs, which stay
OLD = 12
JULY, AUGUST = (calendar.timegm((2026, month, 15, 12, 0, 0)) for month in (7, 8))
END = calendar.timegm((2026, 11, 26, 0, 0, 0))


def old_job(seq):
    """Jobs 1 to 5 ended in July, the others in August; 9, 10 and 11 are the array 9. Carl's is the third."""
    ended_s = JULY + seq if seq <= 5 else AUGUST + seq
    found = replace(
        job(seq, JobState.SUCCEEDED, user="carl" if seq == 3 else "ada", project="default"),
        submit_s=ended_s - 60,
        ended_s=ended_s,
    )
    if seq not in (9, 10, 11):
        return found
    place = ArrayPosition(array_id=JobId("9"), index=seq - 9, size=3, highest=2)
    return replace(found, id=JobId(f"9_{seq - 9}"), array=place)


def seeded():
    store = MemoryStore()
    jobs = [old_job(seq) for seq in range(1, OLD + 1)]
    recent = [job(seq, JobState.SUCCEEDED) for seq in range(OLD + 1, OLD + IN_MEMORY + 1)]
    store.commit(Batch(records=[*jobs, *(replace(one, submit_s=END - 60, ended_s=END) for one in recent)]))
    of_them = [(attempt(one.seq, 1, AttemptState.ENDED), attempt_use(one.seq), key(one.seq)) for one in jobs]
    for one, (tried, used, named) in zip(jobs, of_them, strict=True):
        store.commit(
            Batch(records=[replace(tried, job_id=one.id), replace(used, job_id=one.id), replace(named, job_id=one.id)])
        )
    store.commit(Batch(history=[replace(line(one.seq, node_id="n0", kind="failed"), job_id=one.id) for one in jobs]))
    return store


@pytest.fixture
def head(tmp_path):
    head = ApiHead(home=str(tmp_path), store=seeded())
    head.clock.ahead_s = END - time.time()
    yield head
    head.close()


@pytest.fixture
def call(head):
    with head.calling() as call:
        yield call


def archive(call, days=30, **more):
    reply = call("admin", "POST", "/v1/retention/runs", {"older_than_s": days * DAY_S, "kinds": ["records"], **more})
    assert reply.status_code == 200, reply.text
    until(lambda: call("operator", "GET", "/v1/retention").json()["run"]["ended_s"])
    return call("operator", "GET", "/v1/retention").json()["run"]


def months(call):
    return {one["month"]: one["jobs"] for one in call("operator", "GET", "/v1/archives").json()["months"]}


def ids(call, month, **params):
    return [one["id"] for one in call("operator", "GET", f"/v1/archives/{month}", params=params).json()["jobs"]]


def test_whole_months_leave_and_are_read_by_month_and_by_job(head, call):
    before = call("user", "GET", "/v1/jobs/4").json()
    story = call("user", "GET", "/v1/jobs/4/story").json()
    done = archive(call)
    assert (done["error"], done["removed"]["records"]["count"], done["kept_records"]) == ("", OLD, 0)
    assert done["removed"]["records"]["bytes"] > 1000
    assert head.store.job(JobId("4")) is None
    assert head.store.history(job_id=JobId("4")) == []
    assert months(call) == {"2026-07": 5, "2026-08": 7}
    assert ids(call, "2026-07") == ["1", "2", "3", "4", "5"]
    assert ids(call, "2026-07", user="carl") == ["3"]
    page = call("operator", "GET", "/v1/archives/2026-08", params={"limit": 3}).json()
    assert ([one["id"] for one in page["jobs"]], page["next"]) == (["6", "7", "8"], 8)
    assert ids(call, "2026-08", after=8) == ["9_0", "9_1", "9_2", "12"]
    assert call("user", "GET", "/v1/jobs/4").json() == {**before, "archived": "2026-07"}
    assert call("user", "GET", "/v1/jobs/4/story").json() == story
    assert any(one.kind == "archived" for one in head.store.history(after=OLD))


def stored_job(seq):
    """Job 2 has outputs and two checkpoints in a store, job 7 checkpoints in a folder and outputs at the head, job 8 outputs in a store."""
    made = old_job(seq)
    paths = [f"{'s3://b/runs' if seq == 2 else '/nfs/runs'}/{made.folder}/step-{step:08d}" for step in (10, 20)]
    saved = [PublishedCheckpoint(epoch=1, step=step, path=path, digest="d") for step, path in enumerate(paths)]
    outputs = "gs://b/results" if seq in (2, 8) else ""
    return replace(made, spec=replace(made.spec, outputs=outputs), checkpoints=tuple(saved) if seq in (2, 7) else ())


def test_archived_jobs_with_files_in_object_stores_are_listed_with_the_addresses(head, call):
    head.store.commit(Batch(records=[stored_job(seq) for seq in (2, 7, 8)]))
    archive(call)
    reply = call("operator", "GET", "/v1/archives/2026-07", params={"stored": True})
    assert reply.status_code == 200, reply.text
    (two,) = reply.json()["jobs"]
    folder = old_job(2).folder
    assert (two["id"], two["output_dir"]) == ("2", f"gs://b/results/{folder}")
    assert two["checkpoints"] == [f"s3://b/runs/{folder}/step-{step:08d}" for step in (10, 20)]
    assert ids(call, "2026-08", stored=True) == ["8"]
    plain = call("operator", "GET", "/v1/archives/2026-07").json()["jobs"]
    assert {one["output_dir"] for one in plain} == {""}
    shown = call("user", "GET", "/v1/jobs/2").json()["job"]
    assert shown["output_dir"] == two["output_dir"]  # where `phalanx get` reads


def test_files_of_archives_without_stored_jobs_are_not_read(head, call):
    archive(call)
    (file,) = Path(head.home, "archives", "2026-07").iterdir()
    file.write_bytes(file.read_bytes()[:-20])
    assert ids(call, "2026-07", stored=True) == []
    assert call("operator", "GET", "/v1/archives/2026-07").status_code >= 400


def test_a_dry_run_counts_and_a_second_run_finds_nothing(head, call):
    assert archive(call, dry_run=True)["removed"]["records"]["count"] == OLD
    assert (months(call), head.store.job(JobId("1")) is None) == ({}, False)
    archive(call)
    assert archive(call)["removed"] == {}


def test_a_month_stays_until_all_of_it_is_old(head, call):
    head.clock.ahead_s += calendar.timegm((2026, 9, 14, 0, 0, 0)) - END
    assert archive(call)["removed"]["records"]["count"] == 5
    assert months(call) == {"2026-07": 5}


def test_jobs_with_files_needed_jobs_and_arrays_with_such_an_element_stay(head, call):
    Path(head.home, "logs", head.store.job(JobId("2")).folder).mkdir(parents=True)
    Path(head.output_root, head.store.job(JobId("9_1")).folder).mkdir(parents=True)
    waits = call("user", "POST", "/v1/jobs", {**JOB, "depends_on": "afterok:6", "hold": True})
    assert waits.status_code == 201, waits.text
    done = archive(call)
    stay = {"2", "6", "9_0", "9_1", "9_2"}
    assert {one.id for one in map(old_job, range(1, OLD + 1)) if head.store.job(one.id)} == stay
    assert done["kept_records"] == len(stay)
    assert call("user", "GET", "/v1/jobs/9").json()["job"]["array_id"] == "9"


def test_those_who_may_not_see_a_job_do_not_see_its_archive_either(call):
    before = {role: call(role, "GET", "/v1/jobs/4").json() for role in ("user", "other", "viewer")}
    request = call("user", "GET", "/v1/jobs/4/request").json()
    archive(call)
    assert call("user", "GET", "/v1/jobs/4/request").json() == request
    assert call("other", "GET", "/v1/jobs/4/request").status_code == 403
    for role, seen in before.items():
        assert call(role, "GET", "/v1/jobs/4").json() == {**seen, "archived": "2026-07"}
    assert "train.py" not in call("other", "GET", "/v1/jobs/4").text
    assert REDACTED in call("other", "GET", "/v1/jobs/4/story").text
    assert REDACTED not in call("user", "GET", "/v1/jobs/4/story").text
    for role in ("user", "viewer"):
        assert call(role, "GET", "/v1/archives").status_code == 403
        assert call(role, "GET", "/v1/archives/2026-07").status_code == 403


@pytest.mark.parametrize("job_id", ["99999", "10_99", "x", "-1", "9" * 40, "..%2f2026-07"])
def test_unknown_jobs_are_not_found(call, job_id):
    archive(call)
    assert call("user", "GET", f"/v1/jobs/{job_id}").status_code == 404
    assert call("user", "GET", f"/v1/jobs/{job_id}/request").status_code == 404


@pytest.mark.parametrize("month", ["2026-7", "2026-13", "..", "2026-07%2f..", "x" * 100])
def test_what_is_no_month_is_refused(call, month):
    archive(call)
    assert call("operator", "GET", f"/v1/archives/{month}").status_code in (400, 404)


def test_an_array_asks_for_an_element(call):
    archive(call)
    reply = call("user", "GET", "/v1/jobs/9")
    assert reply.status_code == 400
    assert reply.json()["error"]["hint"] == "name one element, 9_0 to 9_2"
    assert call("user", "GET", "/v1/jobs/9_1").json()["job"]["id"] == "9_1"


@pytest.mark.parametrize("point", ["archives.month.directory", "backup.write", "backup.rename"])
def test_nothing_leaves_the_store_before_its_file_is_whole(head, call, point):
    arm(point, FailureMode.ERROR)
    failed = archive(call)
    assert (failed["removed"], "no backup" in failed["error"]) == ({}, False)
    assert failed["error"] != ""
    assert all(head.store.job(old_job(seq).id) for seq in range(1, OLD + 1))
    assert months(call) == {}
    assert archive(call)["removed"]["records"]["count"] == OLD


def test_jobs_in_two_files_are_listed_once(head, call):
    """As after a head that died between the file and the commit that removes the jobs."""
    july = [old_job(seq) for seq in range(1, 6)]
    archives = JobArchives(f"{head.home}/archives", version="0")
    assert (
        archives.write("2026-07", july, (one for found in july for one in records_of(head.store, found)))
        == "2026-07/1-5"
    )
    archive(call)
    assert ids(call, "2026-07") == ["1", "2", "3", "4", "5"]
    assert [one.path.rsplit("/")[-1] for one in archives.files("2026-07")] == ["1-5.2.gz", "1-5.gz"]


def test_a_damaged_archive_says_so(head, call):
    archive(call)
    [path] = Path(head.home, "archives", "2026-07").iterdir()
    whole = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(whole.replace(b"ada", b"eve", 1)))
    reply = call("operator", "GET", "/v1/archives/2026-07")
    assert "damaged" in reply.json()["error"]["message"]


def test_jobs_in_memory_and_the_newest_are_refused(head):
    for jobs, newest in ((["1", "1012"], 1012), (["1"], OLD + IN_MEMORY)):
        event = RemoveArchivedJobs(jobs=[JobId(one) for one in jobs], newest_seq=newest, archive="x", by=UserId("ada"))
        with pytest.raises(Conflict, match="too new"):
            head.ask(event)
    assert head.store.job(JobId("1")) is not None


def test_files_must_not_outlive_records(call):
    for periods in ({"records": 1e7}, {"records": 1e7, "logs": 1e7}, {"records": 1e7, "logs": 1e7, "outputs": 2e7}):
        reply = call("admin", "PUT", "/v1/retention", {"periods_s": periods})
        assert reply.status_code == 400
        assert "records" in reply.json()["error"]["message"]
    good = {"records": 1e7, "logs": 1e7, "outputs": 9e6}
    assert call("admin", "PUT", "/v1/retention", {"periods_s": good}).status_code == 200
