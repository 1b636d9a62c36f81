"""API calls for what jobs produce (history, steps, logs, files), and for uploads."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator
from math import inf
from typing import IO, TYPE_CHECKING, Final

from phalanx.client.api_calls import (
    ApiCalls,
    LazyModule,
    path_segment,
    query_string,
)
from phalanx.client.event_stream import Event, follow_stream
from phalanx.client.transport import REPLY_TIMEOUT_S, Retry, unreachable_error
from phalanx.core.errors import Unreachable

if TYPE_CHECKING:
    from phalanx.wire.api import output as api
else:
    api = LazyModule("phalanx.wire.api.output")

_COPY_BYTES: Final = 1 << 18


class OutputsApi(ApiCalls):
    """Read or follow the history, logs and files of jobs; upload working directories."""

    def history(self, job_id: str, *, after: int = 0, limit: int = 1000) -> api.HistoryReply:
        """Return the history of a job."""
        return self._get(
            f"/v1/jobs/{path_segment(job_id)}/story" + query_string({"after": after, "limit": limit}), api.HistoryReply
        )

    def whole_history(self, *, after: int = 0, node: str | None = None, limit: int = 500) -> api.HistoryReply:
        """Return the history of all jobs and nodes, or of one node."""
        return self._get("/v1/story" + query_string({"after": after, "node": node, "limit": limit}), api.HistoryReply)

    def steps(self, job_id: str, *, after: str = "", rank: str = "0", limit: int = 10_000) -> api.StepsReply:
        """Return reported steps. For the next page, pass `cursor` of the reply as `after`."""
        parameters = {"after": after or None, "rank": rank, "limit": limit}
        return self._get(f"/v1/jobs/{path_segment(job_id)}/steps" + query_string(parameters), api.StepsReply)

    def logs(
        self,
        job_id: str,
        *,
        rank: str = "all",
        epoch: int | None = None,
        cursor: str = "",
        tail_bytes: int | None = None,
    ) -> api.LogsReply:
        """Return one page of output. For the next page, pass `cursor` of the reply."""
        parameters = {"rank": rank, "epoch": epoch, "cursor": cursor or None, "tail_bytes": tail_bytes}
        return self._get(f"/v1/jobs/{path_segment(job_id)}/logs" + query_string(parameters), api.LogsReply)

    def follow_logs(
        self,
        job_id: str,
        *,
        rank: str = "all",
        epoch: int | None = None,
        cursor: str = "",
        tail_bytes: int | None = None,
    ) -> Iterator[Event]:
        """Yield output as it arrives: `log` and `state` events, then `end`. Nothing is lost or repeated when head or job restart."""
        parameters = {"follow": 1, "rank": rank, "epoch": epoch, "tail_bytes": tail_bytes}
        return follow_stream(
            self.transport, f"/v1/jobs/{path_segment(job_id)}/logs" + query_string(parameters), cursor=cursor
        )

    def follow_events(self, job_id: str, *, after: int = 0, until_s: float = inf) -> Iterator[Event]:
        """Yield `story` and `state` events of a job, then `end`; stop when the transport's clock reaches `until_s`."""
        path = f"/v1/jobs/{path_segment(job_id)}/events"
        return follow_stream(self.transport, path, cursor=str(after) if after else "", until_s=until_s)

    def files(self, job_id: str, path: str = "") -> api.FilesReply:
        """List one folder of a job's outputs."""
        return self._get(
            f"/v1/jobs/{path_segment(job_id)}/files" + query_string({"path": path or None}), api.FilesReply
        )

    def download_archive(
        self, job_id: str, out: IO[bytes], path: str = "", *, on_size: Callable[[int], None] | None = None
    ) -> int:
        """Write a tar archive of a job's outputs to `out`; return its size in bytes.

        `on_size` is called before the first byte with the expected size, if the head knows it.

        Raises:
            Unreachable: the connection broke; `out` holds an incomplete archive.
        """
        path = f"/v1/jobs/{path_segment(job_id)}/files/archive" + query_string({"path": path or None})
        reply, written = self._open(path), 0
        expected = reply.headers.get(api.ARCHIVE_BYTES_HEADER, "")
        if on_size is not None and expected.isdecimal():
            on_size(int(expected))
        try:
            while piece := reply.read(_COPY_BYTES):
                out.write(piece)
                written += len(piece)
        except http.client.HTTPException as error:
            raise unreachable_error(self.transport, error) from error
        finally:
            reply.close()
        return written

    def has_blob(self, sha256: str) -> bool:
        """Return whether the head has an upload already."""
        from phalanx.core.errors import NotFound

        try:
            self.transport.json("HEAD", f"/v1/blobs/{path_segment(sha256)}")
        except NotFound:
            return False
        return True

    def upload(self, file: IO[bytes], sha256: str, size_bytes: int) -> None:
        """Upload a file unless the head has it. It is read from its current position."""
        if self.has_blob(sha256):
            return
        headers = {"Content-Length": str(size_bytes), "Content-Type": "application/octet-stream"}
        path = f"/v1/blobs/{path_segment(sha256)}"
        self.transport.send("PUT", path, file, idempotent=False, headers=headers, timeout_s=REPLY_TIMEOUT_S)

    def _open(self, path: str) -> http.client.HTTPResponse:
        retry = Retry(self.transport)
        while True:
            try:
                return self.transport.open(path, {})
            except (OSError, http.client.HTTPException, Unreachable) as error:
                retry.wait_or_raise(error, retryable=True)
