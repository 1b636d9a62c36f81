"""Retention over HTTP: files of jobs that ended long ago go, each after a line in the job's history; files of all other jobs stay."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import hashlib
import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.cli.cluster import retention
from phalanx.cli.root import main
from phalanx.core.work.job import PublishedCheckpoint
from phalanx.failpoints import FailureMode, arm
from phalanx.ports.store import Batch
from phalanx.torch import checkpoint_folder as folders
from phalanx.wire import manifest
from tests.contract.api_head import TOKENS, Supervisor, code, until

DAY_S = 86400.0


def finished(head, call, supervisor, name="train"):
    """A job that wrote a log and an output file, and has ended."""
    job = call.submit(name=name)
    until(lambda: call("user", "GET", f"/v1/jobs/{job}").json()["job"]["state"] != "pending")
    supervisor.run(job)
    write(head, supervisor, job)
    supervisor.end(job)
    until(lambda: head.store.job(job).state.terminal)
    return job


def write(head, supervisor, job):
    assert supervisor.ship(job, 1, "rank-0", 0, b"hello\n").status_code == 200
    folder = Path(head.output_root, head.store.job(job).folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.bin").write_bytes(bytes(5000))


@pytest.fixture
def supervisor(head, call):
    found = Supervisor(call, devices=8)
    found.hello()
    found.lease()
    return found


def clean(call, days=30, **more):
    reply = call("admin", "POST", "/v1/retention/runs", {"older_than_s": days * DAY_S, **more})
    assert reply.status_code == 200, reply.text
    number = reply.json()["number"]
    until(lambda: call("operator", "GET", "/v1/retention").json()["run"]["ended_s"])
    done = call("operator", "GET", "/v1/retention").json()["run"]
    assert (done["number"], done["error"]) == (number, "")
    return done


def stored(head, job):
    folder = head.store.job(job).folder
    return sorted(kind for kind in ("logs", "outputs") if os.path.exists(f"{head.home}/{kind}/{folder}"))


def output(call, job):
    return call("user", "GET", f"/v1/jobs/{job}/logs").json()


def test_files_of_jobs_that_ended_long_ago_go_and_those_of_other_jobs_stay(head, call, supervisor):
    old = finished(head, call, supervisor)
    runs = call.submit(name="long")
    until(lambda: call("user", "GET", f"/v1/jobs/{runs}").json()["job"]["state"] != "pending")
    supervisor.run(runs)
    write(head, supervisor, runs)
    head.clock.ahead_s += 40 * DAY_S
    supervisor.lease([(runs, 1)])
    young = finished(head, call, supervisor)
    done = clean(call)
    assert {kind: one["count"] for kind, one in done["removed"].items()} == {"logs": 1, "outputs": 1}
    assert done["removed"]["outputs"]["bytes"] >= 5000
    assert [stored(head, job) for job in (old, runs, young)] == [[], ["logs", "outputs"], ["logs", "outputs"]]
    assert [line.facts for line in head.store.history(job_id=old) if line.kind == "files_removed"] == [
        {"files": "logs"},
        {"files": "outputs"},
    ]
    assert "were removed on" in output(call, old)["note"]
    assert output(call, young)["chunks"][0]["text"] == "hello\n"
    missing = call("user", "GET", f"/v1/jobs/{old}/files")
    assert code(missing) == (404, "not_found")
    assert "30d00h" in missing.json()["error"]["message"]


def test_dry_run_counts_and_removes_nothing(head, call, supervisor):
    old = finished(head, call, supervisor)
    head.clock.ahead_s += 40 * DAY_S
    done = clean(call, dry_run=True)
    assert done["removed"]["logs"]["count"] == 1
    assert [(one["kind"], one["name"], one["user"]) for one in done["largest"]] == [
        ("outputs", old, "ada"),
        ("logs", old, "ada"),
    ]
    assert stored(head, old) == ["logs", "outputs"]
    assert [line for line in head.store.history(job_id=old) if line.kind == "files_removed"] == []


def test_only_the_kinds_that_are_asked_for_go(head, call, supervisor):
    old = finished(head, call, supervisor)
    head.clock.ahead_s += 40 * DAY_S
    clean(call, kinds=["logs"])
    assert stored(head, old) == ["outputs"]


def test_files_of_unknown_jobs_stay(head, call, supervisor):
    old = finished(head, call, supervisor)
    head.clock.ahead_s += 40 * DAY_S
    strangers = [Path(head.home, kind, name) for kind in ("logs", "outputs") for name in (f"{old}-00ff", "99-ab12")]
    for folder in strangers:
        folder.mkdir(parents=True)
        (folder / "kept").write_text("of a job that the database does not know")
    clean(call)
    assert all((folder / "kept").exists() for folder in strangers)


def save(head, job, step, content=b"weights", *, rotten=False):
    """A published checkpoint among the head's copies."""
    attempt = head.store.attempts(job)[0]
    folder = Path(head.home, "checkpoints", attempt.folder, f"step-{step:08d}")
    folder.mkdir(parents=True)
    (folder / "a.bin").write_bytes(content)
    size, crc = manifest.checksum(str(folder / "a.bin"))
    files = [manifest.ManifestFile(path="a.bin", size_bytes=size, crc32=crc)]
    digest = folders.write_manifest(str(folder), folders.encode_manifest(step=step, epoch=1, world_size=2, files=files))
    if rotten:
        (folder / "a.bin").write_bytes(b"rotten!")
    return PublishedCheckpoint(epoch=1, step=step, path=str(folder), digest=digest, bytes=size), folder


def with_checkpoints(head, job, *saved):
    head.store.commit(Batch(records=[replace(head.store.job(job), checkpoints=tuple(saved))]))


def test_the_newest_valid_checkpoint_stays(head, call, supervisor):
    old = finished(head, call, supervisor)
    (first, earlier), (second, newest) = save(head, old, 10), save(head, old, 20)
    with_checkpoints(head, old, first, second)
    head.clock.ahead_s += 40 * DAY_S
    assert clean(call, kinds=["checkpoints"])["removed"]["checkpoints"]["count"] == 1
    assert (earlier.exists(), newest.exists()) == (False, True)
    assert clean(call, kinds=["checkpoints"])["removed"] == {}


def test_the_only_checkpoint_of_a_job_is_not_read(head, call, supervisor, monkeypatch):
    old = finished(head, call, supervisor)
    only, folder = save(head, old, 10)
    with_checkpoints(head, old, only)
    head.clock.ahead_s += 40 * DAY_S
    read = []
    monkeypatch.setattr(manifest, "verify", lambda *args, **_: read.append(args))
    assert clean(call, kinds=["checkpoints"])["removed"] == {}
    assert (read, folder.exists()) == ([], True)


def test_an_earlier_checkpoint_stays_if_the_newest_is_damaged(head, call, supervisor):
    old = finished(head, call, supervisor)
    (first, earlier), (second, newest) = save(head, old, 10), save(head, old, 20, rotten=True)
    with_checkpoints(head, old, first, second)
    head.clock.ahead_s += 40 * DAY_S
    clean(call, kinds=["checkpoints"])
    assert (earlier / "a.bin").read_bytes() == b"weights"
    assert not newest.exists()


def test_no_checkpoint_goes_if_none_is_valid(head, call, supervisor):
    old = finished(head, call, supervisor)
    (first, earlier), (second, newest) = save(head, old, 10, rotten=True), save(head, old, 20, rotten=True)
    with_checkpoints(head, old, first, second)
    head.clock.ahead_s += 40 * DAY_S
    assert clean(call)["removed"].keys() == {"logs", "outputs"}
    assert earlier.exists()
    assert newest.exists()


def upload(call, content):
    name = hashlib.sha256(content).hexdigest()
    assert call("user", "PUT", f"/v1/blobs/{name}", content=content).status_code == 200
    return name


def test_uploads_go_unless_a_job_needs_them_or_someone_is_about_to_submit_with_them(head, call):
    needed, asked, idle = (upload(call, content) for content in (b"needed", b"asked", b"idle"))
    call.submit(upload=needed)
    for name in (needed, asked, idle):
        os.utime(head.parts.blobs.path(name), (0, 0))
    call("user", "HEAD", f"/v1/blobs/{asked}")
    assert clean(call, kinds=["uploads"])["removed"]["uploads"]["count"] == 1
    assert [head.parts.blobs.has(name) for name in (needed, asked, idle)] == [True, True, False]


def test_the_policy_removes_files_every_hour(head, call, supervisor):
    old = finished(head, call, supervisor)
    reply = call("admin", "PUT", "/v1/retention", {"periods_s": {"logs": 7 * DAY_S}})
    assert (reply.json()["periods_s"], reply.json()["by"]) == ({"logs": 7 * DAY_S}, "root")
    cleaner = head.app.state.runtime.file_cleaner
    cleaner.sweep()
    until(lambda: cleaner.newest_run().ended_s)
    assert stored(head, old) == ["logs", "outputs"]
    head.clock.ahead_s += 8 * DAY_S
    cleaner.sweep()
    until(lambda: cleaner.newest_run().number == 2 and cleaner.newest_run().ended_s)
    assert stored(head, old) == ["outputs"]
    cleaner.sweep()
    assert cleaner.newest_run().number == 2  # not before the next hour


@pytest.mark.parametrize("point", ["outputs.delete.remove", "outputs.delete_owners.remove", "logs.delete.remove"])
def test_a_removal_that_stops_is_completed_by_the_next_run(head, call, supervisor, point):
    old = finished(head, call, supervisor)
    owners = Path(head.output_root, ".from", f"{head.store.job(old).folder}.json")
    owners.parent.mkdir(exist_ok=True)
    owners.write_text("{}")
    head.clock.ahead_s += 40 * DAY_S
    arm(point, FailureMode.ERROR)
    call("admin", "POST", "/v1/retention/runs", {"older_than_s": 30 * DAY_S})
    until(lambda: call("operator", "GET", "/v1/retention").json()["run"]["ended_s"])
    assert call("operator", "GET", "/v1/retention").json()["run"]["error"]
    clean(call)
    assert (stored(head, old), owners.exists()) == ([], False)


def test_files_that_cannot_be_removed_do_not_hold_up_those_of_other_jobs(head, call, supervisor):
    stuck, other = finished(head, call, supervisor), finished(head, call, supervisor)
    head.clock.ahead_s += 40 * DAY_S
    arm("outputs.delete.remove", FailureMode.ERROR)  # once: the first one
    call("admin", "POST", "/v1/retention/runs", {"older_than_s": 30 * DAY_S, "kinds": ["outputs"]})
    until(lambda: call("operator", "GET", "/v1/retention").json()["run"]["ended_s"])
    run = call("operator", "GET", "/v1/retention").json()["run"]
    assert run["error"]
    assert run["removed"]["outputs"]["count"] == 1
    assert (stored(head, stuck), stored(head, other)) == (["logs", "outputs"], ["logs"])


def test_one_run_at_a_time(head, call, supervisor):
    finished(head, call, supervisor)
    head.clock.ahead_s += 40 * DAY_S
    entered, leave = threading.Event(), threading.Event()
    delete = head.logs.delete

    def slow(folder):
        entered.set()
        leave.wait(60)
        delete(folder)

    head.logs.delete = slow
    call("admin", "POST", "/v1/retention/runs", {"older_than_s": DAY_S})
    entered.wait(60)
    assert code(call("admin", "POST", "/v1/retention/runs", {"older_than_s": DAY_S})) == (409, "conflict")
    leave.set()
    until(lambda: call("operator", "GET", "/v1/retention").json()["run"]["ended_s"])


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/retention/runs", {"older_than_s": 60.0}),
        ("POST", "/v1/retention/runs", {"older_than_s": 1e12, "kinds": ["log"]}),
        ("PUT", "/v1/retention", {"periods_s": {"logs": 1.0}}),
        ("PUT", "/v1/retention", {"periods_s": {"model": DAY_S}}),
    ],
)
def test_wrong_bodies_are_refused_and_change_nothing(call, method, path, body):
    assert code(call("admin", method, path, body)) == (400, "bad_request")
    assert call("operator", "GET", "/v1/retention").json()["periods_s"] == {}


def test_clean_lists_what_old_jobs_left_in_object_stores_and_how_to_remove_it(
    head, call, supervisor, monkeypatch, capsys
):
    old = call.submit(name="train", outputs="s3://corpus/results")
    until(lambda: call("user", "GET", f"/v1/jobs/{old}").json()["job"]["state"] != "pending")
    supervisor.run(old)
    supervisor.end(old)
    until(lambda: head.store.job(old).state.terminal)
    ended_s = head.store.job(old).ended_s
    for name, text in (("URL", call.url), ("TOKEN", TOKENS["admin"]), ("HOME", str(head.home))):
        monkeypatch.setenv(f"PHALANX_{name}", text)
    address = f"s3://corpus/results/{head.store.job(old).folder}"

    def shown(*words, days):
        now_s = ended_s + days * DAY_S
        monkeypatch.setattr(retention, "time", SimpleNamespace(time=lambda: now_s, sleep=time.sleep))
        assert main(["clean", "--older-than", "30d", *words]) == 0
        return capsys.readouterr().out

    assert address not in shown(days=29)
    assert address not in shown("--only", "logs", days=31)
    assert address not in shown("--only", "checkpoints", days=31)
    lines = shown(days=31).splitlines()
    assert lines[-2].split() == ["outputs", old, head.store.job(old).user, address]
    assert lines[-1] == "next: phalanx clean --older-than 30d --stores"
    stores = json.loads(shown("--json", days=31))["stores"]
    assert [(one["job"], one["url"], one["bytes"]) for one in stores] == [(old, address, None)]
