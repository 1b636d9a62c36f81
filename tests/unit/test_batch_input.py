"""The check of a batch's requests."""

import io
import json

import pytest

from phalanx.batches import input_check
from phalanx.batches.batch_job import BatchPacker, batch_keys, batch_labels, check_metadata
from phalanx.batches.batch_view import BatchProgress, batch_status
from phalanx.batches.input_check import ERRORS_MAX, InputCheck
from phalanx.core.errors import BadRequest, NotPermitted
from phalanx.core.work.job_file.request import spec_from_mapping
from phalanx.core.work.states import JobState
from phalanx.wire.api.jobs import JobKeysReply, JobView

CHAT = "/v1/chat/completions"
SERVICE = {"type": "service", "name": "chat", "run": "serve", "gpus": 2, "env": {"A": "1"}, "ready": "/health"}


def line(number, **more):
    record = {"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": {"model": "chat"}} | more
    return json.dumps(record).encode() + b"\n"


def checked(content, endpoint=CHAT):
    check = InputCheck(endpoint=endpoint)
    passed = b"".join(check.read(io.BytesIO(content)))
    return check, passed


def test_a_good_file_passes_as_it_is_and_empty_lines_count_for_nothing():
    check, passed = checked(line(1) + b"\n" + line(2).rstrip())
    assert (check.errors, check.lines, check.model) == ([], 2, "chat")
    assert passed == line(1) + b"\n" + line(2)


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"custom_id": None}, "missing_required_parameter", "custom_id"),
        ({"custom_id": ""}, "missing_required_parameter", "custom_id"),
        ({"custom_id": "x" * 513}, "missing_required_parameter", "custom_id"),
        ({"custom_id": 7}, "missing_required_parameter", "custom_id"),
        ({"method": "GET"}, "invalid_method", "method"),
        ({"url": "/v1/files"}, "mismatched_endpoint", "url"),
        ({"body": "text"}, "missing_required_parameter", "body"),
        ({"body": {}}, "missing_required_parameter", "body.model"),
        ({"body": {"model": "chat", "stream": True}}, "invalid_value", "body.stream"),
        ({"body": {"model": "b"}}, "mismatched_model", "body.model"),
    ],
)
def test_each_wrong_field_is_named_with_its_line(change, code, param):
    check, _ = checked(line(1) + line(2, **change))
    assert [(one.code, one.line, one.param) for one in check.errors] == [(code, 2, param)]


def test_nan_is_no_json():
    check, _ = checked(b'{"custom_id": "a", "body": NaN}\n')
    assert [one.code for one in check.errors] == ["invalid_json_line"]


def test_the_list_of_errors_is_bounded_and_the_number_is_not():
    check, _ = checked(b"x\n" * 1000)
    assert (len(check.errors), check.wrong) == (ERRORS_MAX, 1000)


def test_a_file_of_too_many_requests_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr(input_check, "LINES_MAX", 100)
    text = line(1).rstrip()
    source = io.BytesIO(b"\n".join(text.replace(b"r1", b"r%d" % number) for number in range(102)))
    check = InputCheck(endpoint=CHAT)
    assert sum(1 for _ in check.read(source)) == 100
    assert [one.code for one in check.errors] == ["too_many_requests"]


def test_the_job_has_the_template_of_the_service_and_the_lowest_priority():
    packer = BatchPacker(CHAT)
    packer.pack_input(io.BytesIO(line(1)))
    reply = JobKeysReply(keys=SERVICE)
    packed = packer.finish(reply, batch="b", revision=1, expires_s=0.0)
    labels = batch_labels(packer.check, "file-1", window_s=60.0, metadata={"team": "nlp"})
    keys = batch_keys("chat", reply, packed.sha256, labels=labels, name="batch-chat")
    packed.close()
    spec = spec_from_mapping(keys, workdir="/")
    assert spec.service is None
    assert (spec.priority, spec.preemptible, spec.saves_on_stop) == (-10_000, True, True)
    assert (spec.role.gpus.total, spec.role.gpus.nodes, spec.env) == (2, 1, (("A", "1"),))
    assert dict(spec.labels)["meta.team"] == "nlp"


@pytest.mark.parametrize(
    ("keys", "hidden", "error"),
    [
        (SERVICE, ["A"], NotPermitted),
        (SERVICE | {"gpus": "2x8"}, [], BadRequest),
        (SERVICE | {"upload": "0" * 64}, [], BadRequest),
        (SERVICE | {"requirements": "r.txt"}, [], BadRequest),
        (SERVICE | {"tasks_per_node": 2}, [], BadRequest),
    ],
)
def test_services_that_a_batch_cannot_start_are_refused(keys, hidden, error):
    reply = JobKeysReply(keys=keys, hidden_env=hidden)
    with pytest.raises(error):
        batch_keys("chat", reply, "0" * 64, labels={}, name="b")


@pytest.mark.parametrize(
    "metadata", [{"": "x"}, {"a b": "x"}, {"a": "x" * 257}, {"a": "\n"}, {f"k{n}": "" for n in range(17)}]
)
def test_metadata_that_cannot_be_labels_is_refused(metadata):
    with pytest.raises(BadRequest):
        check_metadata(metadata)


@pytest.mark.parametrize(
    ("job", "state", "status"),
    [
        ({"state": "pending"}, None, "validating"),
        ({"state": "running", "epoch": 1}, None, "in_progress"),
        ({"state": "pending", "epoch": 1}, "in_progress", "in_progress"),
        ({"state": "running", "epoch": 1}, "finalizing", "finalizing"),
        ({"state": "running", "epoch": 1, "cancelled_by": "ada"}, "in_progress", "cancelling"),
        ({"state": "cancelled", "epoch": 1}, "in_progress", "cancelled"),
        ({"state": "failed", "epoch": 1}, "in_progress", "failed"),
        ({"state": "succeeded", "epoch": 1}, "completed", "completed"),
        ({"state": "succeeded", "epoch": 1}, "expired", "expired"),
    ],
)
def test_states(job, state, status):
    common = {"id": "1", "seq": 1, "name": "b", "user": "ada", "project": "p", "queue": "q", "submit_s": 1.0}
    progress = None if state is None else BatchProgress(state=state)
    view = JobView(**(common | job | {"state": JobState(job["state"])}))
    assert batch_status(view, progress) == status
