"""Outputs that the head keeps for nodes which do not share its folders: the real head's API, and the supervisor's own hands at the other end."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import math
import os
import re
import threading
from pathlib import Path
from urllib.parse import urlencode

import pytest

from phalanx.failpoints import FailureMode, armed
from phalanx.node.logic.local_copies import outputs_folder
from phalanx.node.transfer.output_sync import OutputSync
from tests.contract.api_head import ApiHead, Supervisor, code, until
from tests.contract.test_checkpoint_uploads import Server


@pytest.fixture
def head(tmp_path):
    head = ApiHead(str(tmp_path / "head"))
    head.driver.leases.grant_long(3600.0, math.inf)  # nobody renews here
    yield head
    head.close()


@pytest.fixture
def call(head):
    with head.calling() as call:
        yield call


class Writer(Server):
    """A node with an output folder of its own."""

    def begin(self):
        self.prepare()
        self.present.outputs = outputs_folder(self.present.scratch.path)
        self.root = Path(self.present.outputs)
        self.root.mkdir(parents=True)
        self.outputs = OutputSync(self.access, self.ended, note=lambda _, text: self.said.append(text))
        self.outputs.download_earlier(self.present)
        return self

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def send(self):
        sent = []
        self.outputs.notify_when_sent(self.present, lambda: sent.append(True), patient=True)
        until(lambda: sent)

    def texts(self):
        return {str(path.relative_to(self.root)): path.read_text() for path in self.root.rglob("*") if path.is_file()}


@pytest.fixture
def gang(call, tmp_path):
    """A job on n0 and n1, and how it is placed again."""
    nodes = [Writer(call, tmp_path, name) for name in ("n0", "n1")]
    job = call.submit(gpus="2x1", tasks_per_node=1)
    yield job, [node.begin() for node in nodes]
    for node in nodes:
        node.ended.set()


def at_the_head(head, job):
    root = Path(head.output_root, f"{job}-k")
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}


def test_what_ranks_write_is_at_the_head_under_its_name_and_what_only_grew_is_not_sent_again(head, gang, call):
    job, (n0, _) = gang
    n0.write("model/weights.txt", "w" * 100)
    n0.write("log.txt", "one\n")
    n0.send()
    assert at_the_head(head, job) == {"model/weights.txt": "w" * 100, "log.txt": "one\n"}
    inode = Path(head.output_root, f"{job}-k", "log.txt").stat().st_ino
    with open(n0.root / "log.txt", "a", encoding="ascii") as file:
        file.write("two\n")
    n0.send()
    assert at_the_head(head, job)["log.txt"] == "one\ntwo\n"
    assert Path(head.output_root, f"{job}-k", "log.txt").stat().st_ino == inode, "made longer, not replaced"
    n0.write("log.txt", "THREE and more than that\n")
    n0.send()
    assert at_the_head(head, job)["log.txt"] == "THREE and more than that\n"
    listed = call("user", "GET", f"/v1/jobs/{job}/files").json()["entries"]
    assert [entry["path"] for entry in listed] == ["model", "log.txt"]
    assert n0.said == []


def test_a_piece_whose_sync_failed_and_that_ranks_wrote_otherwise_since_is_replaced_with_the_whole_file(head, gang):
    """Found by reading: other bytes of the same length were answered with the end of those that are here, and so never came."""
    job, (n0, _) = gang
    n0.write("log.txt", "one\n")
    n0.send()
    n0.write("log.txt", "one\ntwo\n")
    with armed("outputs.extend.sync", FailureMode.ERROR):
        n0.outputs.send_changes(n0.present)
    n0.write("log.txt", "one\n2.0\n")
    n0.send()
    assert at_the_head(head, job) == {"log.txt": "one\n2.0\n"}
    assert n0.said == []


def test_what_ranks_remove_or_rename_is_removed_or_renamed_at_the_head(head, gang):
    job, (n0, n1) = gang
    for name in ("old/step-1.pt", "new.pt.tmp", "stays.txt"):
        n0.write(name, name)
    n1.write("stays.txt", "of the second")
    n0.send()
    n1.send()
    (n0.root / "old/step-1.pt").unlink()
    (n0.root / "old").rmdir()
    (n0.root / "new.pt.tmp").rename(n0.root / "new.pt")
    (n1.root / "stays.txt").unlink()
    n0.send()
    n1.send()
    assert at_the_head(head, job) == {"new.pt": "new.pt.tmp", "stays.txt": "stays.txt"}
    assert not Path(head.output_root, f"{job}-k", "old").exists()
    assert n0.said == n1.said == []


def put_project(call, project, **body):
    assert (answer := call("admin", "PUT", f"/v1/projects/{project}", body)).status_code in (200, 201), answer.text


def test_a_project_without_space_gets_no_more_outputs_until_some_are_removed(head, gang, call):
    job, (n0, _) = gang
    project = call("user", "GET", f"/v1/jobs/{job}").json()["job"]["project"]
    put_project(call, project, outputs="1M")
    n0.write("a.bin", "a" * 700_000)
    n0.send()
    n0.write("b.bin", "b" * 700_000)
    n0.send()
    n0.send()
    assert list(at_the_head(head, job)) == ["a.bin"]
    assert len(n0.said) == 1, "told once"
    assert "output 'b.bin' is not stored" in n0.said[0]
    assert "may have 1 MiB" in n0.said[0]
    (n0.root / "a.bin").unlink()
    n0.send()  # the removal comes after the refused file
    n0.outputs.send_changes(n0.present)
    assert list(at_the_head(head, job)) == []
    head.app.state.runtime.output_usage._measured_s -= (
        60.0  # removed files are seen by the next pass, at the earliest 5 s after the last one
    )
    n0.send()
    assert list(at_the_head(head, job)) == ["b.bin"]
    shown = call("user", "GET", f"/v1/projects/{project}").json()
    assert shown["project"]["outputs_bytes"] == 1 << 20
    assert 700_000 <= shown["outputs_used_bytes"] <= 1 << 20


def outputs_lines(head):
    lines = head.store.history(limit=10_000)
    return [(line.kind, line.text) for line in lines if line.kind in ("outputs_warning", "outputs_full")]


def test_who_nearly_fills_the_space_is_told_once_and_again_after_there_was_room(head, gang, call):
    job, (n0, _) = gang
    usage = head.app.state.runtime.output_usage
    project = call("user", "GET", f"/v1/jobs/{job}").json()["job"]["project"]
    put_project(call, project, outputs="1M")
    n0.write("a.bin", "a" * 600_000)
    n0.send()
    usage.check()
    assert outputs_lines(head) == []
    n0.write("b.bin", "b" * 300_000)
    n0.send()
    for _ in range(2):
        usage.check()
    ((kind, text),) = outputs_lines(head)
    assert kind == "outputs_warning"
    assert re.fullmatch(
        rf"outputs of project {project} take 8\d\d KiB of 1 MiB at the head(; most have jobs .*)?", text
    ), text
    n0.write("c.bin", "c" * 300_000)
    n0.send()
    usage._measured_s -= 60.0
    for _ in range(3):
        n0.outputs.send_changes(n0.present)  # it tries again, in vain
        usage.check()
    assert [kind for kind, _ in outputs_lines(head)] == ["outputs_warning", "outputs_full"]
    assert f"no more are taken from nodes; most have jobs {job} (" in outputs_lines(head)[1][1]
    put_project(call, project, outputs="10M")
    n0.send()
    usage.check()
    usage._refused_s.clear()  # an hour later
    put_project(call, project, outputs="1M")
    usage.check()
    assert [kind for kind, _ in outputs_lines(head)] == ["outputs_warning", "outputs_full", "outputs_full"]
    (n0.root / "b.bin").unlink()
    (n0.root / "c.bin").unlink()
    n0.send()
    usage._measured_s -= 3600.0
    usage.check()
    n0.write("b.bin", "b" * 300_000)
    n0.send()
    usage.check()
    assert [kind for kind, _ in outputs_lines(head)][3:] == ["outputs_warning"]


def test_an_upload_that_was_refused_halfway_counts_and_is_not_taken_again(head, gang, call):
    job, (n0, _) = gang
    project = call("user", "GET", f"/v1/jobs/{job}").json()["job"]["project"]
    put_project(call, project, outputs="9M")
    n0.write("big.bin", "x" * (12 << 20))
    n0.send()
    received = sum(path.stat().st_size for path in Path(head.output_root, ".coming").rglob("*") if path.is_file())
    assert 0 < received <= 9 << 20
    for _ in range(3):
        head.app.state.runtime.output_usage._measured_s -= 3600.0
        n0.outputs.send_changes(n0.present)
        assert call("user", "GET", f"/v1/projects/{project}").json()["outputs_used_bytes"] >= received
    put_project(call, project, outputs="none")
    n0.send()
    assert list(at_the_head(head, job)) == ["big.bin"]


def test_an_admin_of_the_project_alone_may_not_give_it_more_space(head, call):
    assert call("admin", "PUT", "/v1/projects/nlp", {"admins": ["ada"]}).status_code == 200
    assert code(call("user", "PUT", "/v1/projects/nlp", {"outputs": "none"})) == (403, "not_permitted")


@pytest.mark.parametrize("words", ["0", "-1", "many", "1e30T", ""])
def test_a_limit_on_outputs_that_is_none_is_refused(call, words):
    answer = call("admin", "PUT", "/v1/projects/nlp", {"outputs": words})
    assert code(answer) == (400, "bad_request"), answer.text


def test_two_nodes_that_use_one_name_both_keep_their_file(head, gang):
    job, (n0, n1) = gang
    n1.write("loss.txt", "of the second")
    n1.write("only-here.txt", "second")
    n1.send()
    n0.write("loss.txt", "of the first")
    n0.send()
    n1.write("loss.txt", "of the second, longer")
    n1.send()
    assert at_the_head(head, job) == {
        "loss.txt": "of the first",
        "loss.txt.node-1": "of the second, longer",
        "only-here.txt": "second",
    }


def test_a_new_attempt_finds_on_each_node_what_the_one_before_left(head, gang, call, tmp_path):
    job, (n0, n1) = gang
    for node, text in ((n1, "second"), (n0, "first")):  # the first node comes last, and has the name all the same
        node.write("loss.txt", f"{text} 1\n")
        node.send()
    call("user", "POST", f"/v1/jobs/{job}/requeue")
    for node in (n0, n1):
        node.supervisor.end(job, ranks=0)
    until(lambda: [attempt.epoch for attempt in head.store.attempts(job)] == [1, 2])
    n0.begin()
    n1.begin()
    assert n0.texts() == {"loss.txt": "first 1\n", "loss.txt.node-1": "second 1\n"}
    assert n1.texts() == {"loss.txt": "second 1\n"}
    for node, text in ((n0, "first"), (n1, "second")):
        with open(node.root / "loss.txt", "a", encoding="ascii") as file:
            file.write(f"{text} 2\n")
        node.send()
    assert at_the_head(head, job) == {"loss.txt": "first 1\nfirst 2\n", "loss.txt.node-1": "second 1\nsecond 2\n"}


def test_a_pipe_in_the_place_of_what_is_brought_holds_no_hand(head, gang, call, monkeypatch):
    job, (n0, n1) = gang
    n0.write("loss.txt", "x" * 200_000)  # more than a pipe takes
    n0.send()
    call("user", "POST", f"/v1/jobs/{job}/requeue")
    for node in (n0, n1):
        node.supervisor.end(job, ranks=0)
    until(lambda: [attempt.epoch for attempt in head.store.attempts(job)] == [1, 2])
    made, ended = os.makedirs, []

    def making(folder, *args, **kwargs):
        made(folder, *args, **kwargs)
        if folder == str(n0.root):
            os.mkfifo(f"{folder}/loss.txt")

    def begin():
        try:
            n0.begin()
        except OSError as error:
            ended.append(error.strerror)

    monkeypatch.setattr(os, "makedirs", making)
    thread = threading.Thread(target=begin, daemon=True)
    thread.start()
    thread.join(timeout=100)
    assert ended == ["not a regular file"]


def test_links_and_pipes_stay_behind_and_nothing_is_written_through_a_link_at_the_head(head, gang, tmp_path):
    job, (n0, _) = gang
    n0.write("kept.txt", "kept")
    os.symlink("/etc/passwd", n0.root / "link")
    os.symlink("/etc", n0.root / "folder")
    os.mkfifo(n0.root / "pipe")
    Path(os.fsdecode(os.fsencode(n0.root) + b"/no-\xfftext")).write_text("odd")
    n0.send()
    assert "not printable" in n0.said.pop()
    assert at_the_head(head, job) == {"kept.txt": "kept"}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    os.symlink(elsewhere, Path(head.output_root, f"{job}-k", "sub"))
    n0.write("sub/file.txt", "escaped?")
    n0.send()
    assert list(elsewhere.iterdir()) == []
    assert "sub" in n0.said[-1]
    n0.write("fine.txt", "and the rest goes on")
    n0.send()
    assert at_the_head(head, job)["fine.txt"] == "and the rest goes on"


def test_only_a_node_of_the_live_attempt_may_write_and_nothing_outside_the_folder(head, gang, call):
    job, (n0, n1) = gang
    Supervisor(call, "n2", "s2").hello()

    def put(role, path, epoch=1, **more):
        about = {"job_id": job, "epoch": epoch, "path": path, "offset": 0, **more}
        return call(role, "PUT", f"/v1/node/outputs/file?{urlencode(about)}", content=b"x")

    assert code(put("node:n2", "a")) == (403, "not_permitted")
    assert code(put("node:n0", "a", epoch=2)) == (403, "not_permitted")
    for path in ("../a", "/a", "a/../../b", "a//b", "."):
        assert code(put("node:n0", path)) == (400, "bad_request")
    assert code(put("node:n0", "a", crc32=1, size=1)) == (400, "bad_request"), "other bytes"
    about = urlencode({"job_id": job, "epoch": 1, "path": "../../token"})
    assert code(call("node:n0", "GET", f"/v1/node/outputs/file?{about}")) == (400, "bad_request")
    call("user", "POST", f"/v1/jobs/{job}/cancel")
    for node in (n0, n1):
        node.supervisor.end(job, ranks=0)
    assert code(put("node:n0", "a")) == (409, "attempt_over")
    n0.write("late.txt", "late")
    n0.send()
    assert at_the_head(head, job) == {}
    until(lambda: not list(Path(head.output_root, ".coming").iterdir()))
