"""Outputs of a job: listed and packed, and nothing beside them."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import io
import os
import socket
import tarfile

import pytest

from phalanx.client import Client
from phalanx.core.errors import NotFound
from tests.contract.api_head import TOKENS, ApiHead


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    head = ApiHead(str(home))
    (home / "secret").write_text("not yours")
    with head.calling() as call:
        job_id = call.submit()
        out = home / "outputs" / f"{job_id}-k"
        (out / "deep" / "deeper").mkdir(parents=True)
        (out / "model.bin").write_bytes(b"m" * 1000)
        (out / "deep" / "deeper" / "ü.txt").write_text("umlaut")
        (out / ("long" * 40)).write_text("long name")
        (out / "outside").symlink_to(home / "secret")
        (out / "up").symlink_to("../../secret")
        (out / "deep" / "inside").symlink_to("../model.bin")
        (out / "elsewhere").symlink_to(home, target_is_directory=True)
        os.mkfifo(out / "pipe")
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(out / "s"))
        yield call, job_id
    head.close()


def listed(bench, path="", role="user"):
    call, job_id = bench
    return call(role, "GET", f"/v1/jobs/{job_id}/files", params={"path": path})


def archive(bench, path=""):
    call, job_id = bench
    out = io.BytesIO()
    with Client(call.url, TOKENS["user"]) as client:
        assert client.download_archive(job_id, out, path) == out.tell()
    out.seek(0)
    return tarfile.open(fileobj=out)


def test_listing_shows_folders_first_and_what_each_entry_is(bench):
    entries = {entry["path"]: entry for entry in listed(bench).json()["entries"]}
    assert next(iter(entries)) == "deep"
    assert (entries["model.bin"]["kind"], entries["model.bin"]["size_bytes"]) == ("file", 1000)
    assert {entries[name]["kind"] for name in ("outside", "elsewhere")} == {"link"}
    assert entries["pipe"]["kind"] == "other"
    assert [entry["path"] for entry in listed(bench, "deep/deeper").json()["entries"]] == ["deep/deeper/ü.txt"]
    assert [entry["path"] for entry in listed(bench, "model.bin").json()["entries"]] == ["model.bin"]


@pytest.mark.parametrize("path", ["..", "../1", "deep/../../secret", "/../..", "a/../b", "x\0y"])
def test_paths_that_leave_are_refused(bench, path):
    call, job_id = bench
    assert listed(bench, path).status_code == 400
    assert call("user", "GET", f"/v1/jobs/{job_id}/files/archive", params={"path": path}).status_code == 400


@pytest.mark.parametrize("path", ["elsewhere", "elsewhere/secret", "no", "model.bin/x"])
def test_links_are_not_followed_and_what_is_not_there_is_said(bench, path):
    call, job_id = bench
    if path != "elsewhere":
        assert listed(bench, path).status_code == 404
        assert call("user", "GET", f"/v1/jobs/{job_id}/files/archive", params={"path": path}).status_code == 404
    else:
        assert [entry["kind"] for entry in listed(bench, path).json()["entries"]] == ["link"]


def test_archive_holds_the_outputs_and_only_links_that_stay_inside(bench):
    with archive(bench) as tar:
        names = tar.getnames()
        assert {"model.bin", "deep", "deep/deeper/ü.txt", "deep/inside", "long" * 40} == set(names) - {"deep/deeper"}
        assert tar.extractfile("model.bin").read() == b"m" * 1000
        assert tar.getmember("deep/inside").linkname == "../model.bin"
        assert names == sorted(names, key=lambda name: name.split("/"))


def test_archive_of_one_folder_or_file(bench):
    with archive(bench, "deep") as tar:
        assert set(tar.getnames()) == {"deeper", "deeper/ü.txt"}
    with archive(bench, "model.bin") as tar:
        assert tar.getnames() == ["model.bin"]


def test_job_without_outputs_lists_nothing_and_has_no_archive(bench):
    call, _ = bench
    job_id = call.submit()
    assert call("user", "GET", f"/v1/jobs/{job_id}/files").json()["entries"] == []
    with Client(call.url, TOKENS["user"]) as client, pytest.raises(NotFound):
        client.download_archive(job_id, io.BytesIO())


def test_outputs_are_their_owners(bench):
    assert listed(bench, role="other").status_code == 403
    assert listed(bench, role="viewer").status_code == 403
    assert listed(bench, role="operator").status_code == 200
