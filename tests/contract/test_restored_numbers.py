"""A restored database assigns numbers of jobs and attempts again: the files of those that it has lost are never shown or continued."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated"

import math
import zlib
from contextlib import contextmanager
from urllib.parse import urlencode

import pytest

from phalanx.core.state.reports import MemberStopped
from phalanx.store.sql.backups import backup, restore
from phalanx.torch import checkpoint_folder
from phalanx.wire import manifest
from tests.contract.api_head import ApiHead, Supervisor, until
from tests.contract.test_backups import opened, quiet


class Leadership:
    """A head that leads over these records and this folder, and the supervisor of its one node."""

    def __init__(self, head, call):
        self.head, self.call, self.node = head, call, Supervisor(call)
        self.node.hello()

    def job(self):
        job_id = self.call.submit(retry=3)
        self.node.run(job_id)
        return job_id

    def again(self, job_id):
        """The job's next attempt runs."""
        self.call("user", "POST", f"/v1/jobs/{job_id}/requeue")
        place = {"job_id": job_id, "epoch": 1, "generation": 0, "node_id": "n0"}
        self.node.tell(MemberStopped(**place, at_s=0.0))
        until(lambda: self.head.store.job(job_id).epoch == 2)
        self.node.run(job_id, epoch=2)

    def log(self, job_id):
        return [(c["epoch"], c["text"]) for c in self.call("user", "GET", f"/v1/jobs/{job_id}/logs").json()["chunks"]]

    def outputs(self, job_id):
        return [one["path"] for one in self.call("user", "GET", f"/v1/jobs/{job_id}/files").json()["entries"]]

    def write(self, job_id, epoch, text):
        """Its ranks print the text, save it as the checkpoint of step 5, and write it into a file of that name; what was there before."""
        held = self.node.ship(job_id, epoch, "rank-0", 0, b"").json()["ends"][0]["end"]
        assert self.node.ship(job_id, epoch, "rank-0", held, text.encode()).json()["ends"][0]["end"] == held + len(text)
        about = {"job_id": job_id, "epoch": epoch, "path": text, "offset": 0, "size": 4}
        assert self.put("outputs/file", b"data", crc32=zlib.crc32(b"data"), **about) == {"end": 4}
        file = manifest.ManifestFile(path="a", size_bytes=len(text), crc32=zlib.crc32(text.encode()))
        encoded = checkpoint_folder.encode_manifest(step=5, epoch=epoch, world_size=1, files=[file])
        about = {"job_id": job_id, "epoch": epoch, "step": 5, "digest": manifest.digest(encoded)}
        kept = self.put("checkpoints/manifest", encoded, **about)
        assert self.put("checkpoints/file", text.encode(), path="a", offset=0, **about) == {"end": len(text)}
        return held, kept["complete"], sum(kept["sizes"].values())

    def put(self, what, data, **about):
        reply = self.call("node:n0", "PUT", f"/v1/node/{what}?{urlencode(about)}", content=data)
        assert reply.status_code == 200, reply.text
        return reply.json()


@contextmanager
def leading(home, place, key):
    with opened(place) as store:
        head = ApiHead(str(home), store=store, storage_key=key)
        head.driver.leases.grant_long(3600.0, math.inf)  # nobody renews here
        with head.calling() as call:
            yield Leadership(head, call)
        head.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_after_a_restore_the_numbers_of_lost_jobs_and_attempts_have_new_files(tmp_path, places, kind):
    place, file = places(kind), str(tmp_path / "b.phx")
    with leading(tmp_path, place, "before") as before:
        known = before.job()
        before.write(known, 1, "kept")
        backup(place, file, quiet)
        before.again(known)
        before.write(known, 2, "lost attempt")
        lost = before.job()
        before.write(lost, 1, "secret")
    restore(file, place, quiet, replace=True)
    with leading(tmp_path, place, "after") as after:
        assert after.log(known) == [(1, "kept")]
        after.again(known)
        assert after.job() == lost
        assert (after.log(known), after.log(lost), after.outputs(lost)) == ([(1, "kept")], [], [])
        assert after.write(known, 2, "new attempt") == after.write(lost, 1, "new") == (0, False, 0)
        assert after.log(known) == [(1, "kept"), (2, "new attempt")]
        assert (after.log(lost), after.outputs(lost)) == ([(1, "new")], ["new"])
        assert "kept" in after.outputs(known)
    assert [path.read_text() for path in tmp_path.glob(f"logs/{lost}-before/*/rank-0.log")] == ["secret"]
