"""The options --data and --data-mode: they add to the key `data` of a job file, and a wrong one is refused by its own name."""

import click
import pytest

from phalanx.cli.jobs.request.job_options import job_options
from phalanx.cli.jobs.request.job_request import DoubleDashCommand, JobRequest, job_request
from phalanx.core.errors import BadRequest
from phalanx.core.work.job_file.data_mode import DataMode


def _request(*words: str) -> JobRequest:
    @click.command(cls=DoubleDashCommand)
    @job_options
    @click.pass_context
    def submit(context: click.Context, /, **given: object) -> JobRequest:
        return job_request(context, given)

    found = submit.main(list(words), standalone_mode=False)
    assert isinstance(found, JobRequest)
    return found


def test_options_are_the_datasets_of_a_command():
    spec = _request(
        "--data", "train=s3://b/p?x=1", "--data", "tok=/nfs/tok", "--data-mode", "stream", "--", "true"
    ).spec
    assert spec.data == (("train", "s3://b/p?x=1"), ("tok", "/nfs/tok"))
    assert spec.data_mode is DataMode.STREAM


def test_options_add_to_the_file_and_replace_its_names_and_mode(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("run: 'true'\ndata: {train: s3://b/old, tok: /nfs/tok, mode: stream}\n")
    spec = _request("--data", "train=s3://b/new", "--data-mode", "stage", str(file)).spec
    assert dict(spec.data) == {"train": "s3://b/new", "tok": "/nfs/tok"}
    assert spec.data_mode is DataMode.STAGE
    assert _request("--data", "more=gs://b", str(file)).spec.data_mode is DataMode.STREAM


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "train"], "--data: train has no valid source"),
        (["--data", "train=ftp://x"], "--data: train: ftp://x is not a source"),
        (["--data", "=s3://b"], "--data: '' is not a name"),
        (["--data", "t=hf://datasets/a/b", "--data-mode", "mount"], "--data: t: hf:// cannot be mounted"),
    ],
)
def test_a_wrong_option_is_refused(words, message):
    with pytest.raises(BadRequest, match=message):
        _request(*words, "--", "true")
