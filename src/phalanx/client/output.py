"""Verbs of what jobs leave behind, story, steps, logs and files; and of the uploads they are given."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from math import inf
from typing import IO, TYPE_CHECKING, Final

from phalanx.client.following import Event, follow
from phalanx.client.transport import REPLY_TIMEOUT_S, Retry, unreachable
from phalanx.client.verbs import Records, Verbs, query, segment
from phalanx.core.errors import Unreachable

if TYPE_CHECKING:
    from phalanx.wire.api import output as api
else:
    api = Records("phalanx.wire.api.output")

_COPY_BYTES: Final = 1 << 18


class OutputVerbs(Verbs):
    """Read what jobs said and wrote, at once or as it comes."""

    def story(self, job_id: str, *, after: int = 0, limit: int = 1000) -> api.StoryReply:
        """What happened to a job."""
        return self._get(f"/v1/jobs/{segment(job_id)}/story" + query({"after": after, "limit": limit}), api.StoryReply)

    def whole_story(self, *, after: int = 0, node: str | None = None, limit: int = 500) -> api.StoryReply:
        """What happened to all jobs and nodes, or to one node."""
        return self._get("/v1/story" + query({"after": after, "node": node, "limit": limit}), api.StoryReply)

    def steps(self, job_id: str, *, after: str = "", rank: str = "0", limit: int = 10_000) -> api.StepsReply:
        """Steps as reported; `cursor` of the reply goes into `after`."""
        asked = {"after": after or None, "rank": rank, "limit": limit}
        return self._get(f"/v1/jobs/{segment(job_id)}/steps" + query(asked), api.StepsReply)

    def logs(
        self,
        job_id: str,
        *,
        rank: str = "all",
        epoch: int | None = None,
        cursor: str = "",
        tail_bytes: int | None = None,
    ) -> api.LogsReply:
        """One page of output; `cursor` of the reply goes on."""
        asked = {"rank": rank, "epoch": epoch, "cursor": cursor or None, "tail_bytes": tail_bytes}
        return self._get(f"/v1/jobs/{segment(job_id)}/logs" + query(asked), api.LogsReply)

    def follow_logs(
        self,
        job_id: str,
        *,
        rank: str = "all",
        epoch: int | None = None,
        cursor: str = "",
        tail_bytes: int | None = None,
    ) -> Iterator[Event]:
        """Output as it comes: `log`, `state` and at last `end` events, without gap or double over restarts of head and job."""
        asked = {"follow": 1, "rank": rank, "epoch": epoch, "tail_bytes": tail_bytes}
        return follow(self.transport, f"/v1/jobs/{segment(job_id)}/logs" + query(asked), cursor=cursor)

    def follow_events(self, job_id: str, *, after: int = 0, until_s: float = inf) -> Iterator[Event]:
        """What happens to a job: `story`, `state` and at last `end` events; no more once the transport's clock shows `until_s`."""
        path = f"/v1/jobs/{segment(job_id)}/events"
        return follow(self.transport, path, cursor=str(after) if after else "", until_s=until_s)

    def follow_all(self, *, after: int | None = None) -> Iterator[Event]:
        """What happens to everything, from now on or from after a seq. It never ends by itself."""
        return follow(self.transport, "/v1/events", cursor="" if after is None else str(after))

    def files(self, job_id: str, path: str = "") -> api.FilesReply:
        """One folder of a job's outputs."""
        return self._get(f"/v1/jobs/{segment(job_id)}/files" + query({"path": path or None}), api.FilesReply)

    def fetch_archive(self, job_id: str, out: IO[bytes], path: str = "") -> int:
        """Write a tar archive of a job's outputs to `out`; answers its size in bytes.

        Raises:
            Unreachable: it broke off; what was written is not whole.
        """
        path = f"/v1/jobs/{segment(job_id)}/files/archive" + query({"path": path or None})
        reply, written = self._open(path), 0
        try:
            while piece := reply.read(_COPY_BYTES):
                out.write(piece)
                written += len(piece)
        except http.client.HTTPException as error:
            raise unreachable(self.transport, error) from error
        finally:
            reply.close()
        return written

    def has_blob(self, sha256: str) -> bool:
        """Whether an upload is there already."""
        from phalanx.core.errors import NotFound

        try:
            self.transport.json("HEAD", f"/v1/blobs/{segment(sha256)}")
        except NotFound:
            return False
        return True

    def upload(self, file: IO[bytes], sha256: str, size_bytes: int) -> None:
        """Send bytes unless the head has them. `file` is read from where it stands."""
        if self.has_blob(sha256):
            return
        headers = {"Content-Length": str(size_bytes), "Content-Type": "application/octet-stream"}
        path = f"/v1/blobs/{segment(sha256)}"
        self.transport.send("PUT", path, file, again=False, headers=headers, timeout_s=REPLY_TIMEOUT_S)

    def _open(self, path: str) -> http.client.HTTPResponse:
        retry = Retry(self.transport)
        while True:
            try:
                return self.transport.open(path, {})
            except (OSError, http.client.HTTPException, Unreachable) as error:
                retry.after(error, again=True)
