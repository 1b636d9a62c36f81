"""API calls for what jobs produce (history, steps, logs, files), and for uploads."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator
from math import inf
from typing import IO, TYPE_CHECKING, Final, NamedTuple, cast

from phalanx.client.api_calls import (
    ApiCalls,
    LazyModule,
    path_segment,
    query_string,
)
from phalanx.client.connection.event_stream import Event, follow_stream
from phalanx.client.connection.transport import REPLY_TIMEOUT_S, Retry, unreachable_error
from phalanx.core.errors import BadRequest, Unreachable

if TYPE_CHECKING:
    from phalanx.wire.api import output as api
else:
    api = LazyModule("phalanx.wire.api.output")

_COPY_BYTES: Final = 1 << 18


class ArchivePosition(NamedTuple):
    """Where the download of an archive was interrupted: at byte `offset` of the file `after`; "" for its beginning.

    Files before it are sent again if they changed after `since_s` (Unix seconds of the head's clock).
    """

    after: str = ""
    offset: int = 0
    since_s: float = 0.0

    def query(self) -> dict[str, str | int | None]:
        """The position as parameters of a request."""
        since_ms = int(self.since_s * 1000) or None
        return {"digests": 1, "after": self.after or None, "offset": self.offset or None, "since_ms": since_ms}


class _FileFrom:
    """A file as the body of a request, from `offset` on."""

    def __init__(self, file: IO[bytes], offset: int) -> None:
        self._file, self._offset = file, offset
        self.seek(0)

    def read(self, size: int = -1) -> bytes:
        return self._file.read(size)

    def seek(self, position: int) -> int:
        return self._file.seek(self._offset + position)


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
        self,
        job_id: str,
        out: IO[bytes],
        path: str = "",
        *,
        on_size: Callable[[int], None] | None = None,
        on_time: Callable[[float], None] | None = None,
        rest: ArchivePosition | None = None,
    ) -> int:
        """Write a tar archive of a job's outputs to `out`; return its size in bytes.

        Args:
            job_id: the job, or an element of an array.
            out: is written to.
            path: only this file or folder.
            on_size: called before the first byte with the expected size, if the head knows it.
            on_time: called before that with the head's clock, if the archive has the SHA-256 of each file, which it has if `rest` is given.
            rest: where an earlier download was interrupted; only what is missing follows.

        Raises:
            Unreachable: the connection broke; `out` holds an incomplete archive.
        """
        path = f"/v1/jobs/{path_segment(job_id)}/files/archive" + query_string(
            {"path": path or None, **({} if rest is None else rest.query())}
        )
        reply, written = self._open(path), 0
        begun, expected = (reply.headers.get(name, "") for name in (api.ARCHIVE_TIME_HEADER, api.ARCHIVE_BYTES_HEADER))
        if on_time is not None and begun:
            on_time(float(begun))
        if on_size is not None and expected.isdecimal():
            on_size(int(expected))
        try:
            while piece := self._read(reply):
                out.write(piece)
                written += len(piece)
        finally:
            reply.close()
        return written

    def has_blob(self, sha256: str) -> bool:
        """Return whether the head has an upload already."""
        return self.missing_from(sha256) is None

    def missing_from(self, sha256: str) -> int | None:
        """Return from which byte on the head lacks an upload, after an interrupted one; None if it has all of it."""
        from phalanx.core.errors import NotFound

        found: list[str] = []
        try:
            self.transport.send(
                "HEAD",
                f"/v1/blobs/{path_segment(sha256)}",
                None,
                idempotent=True,
                on_headers=lambda headers: found.append(headers.get(api.BLOB_RECEIVED_HEADER) or "0"),
            )
        except NotFound:
            return int(found[-1]) if found[-1].isdecimal() else 0
        return None

    def upload(
        self, file: IO[bytes], sha256: str, size_bytes: int, *, watch: Callable[[IO[bytes]], IO[bytes]] | None = None
    ) -> None:
        """Upload a file unless the head has it; only what is missing after an interrupted upload.

        Args:
            file: is read from its beginning.
            sha256: of the whole file.
            size_bytes: of the whole file.
            watch: makes the body of the request from the file, which is at the first byte to send.
        """
        for attempt in range(2):
            offset = self.missing_from(sha256)
            if offset is None:
                return
            offset = offset if attempt == 0 and offset <= size_bytes else 0
            body = cast("IO[bytes]", _FileFrom(file, offset))
            headers = {"Content-Length": str(size_bytes - offset), "Content-Type": "application/octet-stream"}
            path = f"/v1/blobs/{path_segment(sha256)}" + query_string({"offset": offset or None})
            sent = watch(body) if watch is not None else body
            try:
                self.transport.send("PUT", path, sent, idempotent=False, headers=headers, timeout_s=REPLY_TIMEOUT_S)
            except BadRequest:
                if not offset:  # else the earlier bytes were others, or are gone: the head has dropped them
                    raise
            else:
                return

    def _read(self, reply: http.client.HTTPResponse) -> bytes:
        try:
            return reply.read(_COPY_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise unreachable_error(self.transport, error) from error

    def _open(self, path: str) -> http.client.HTTPResponse:
        retry = Retry(self.transport)
        while True:
            try:
                return self.transport.open(path, {})
            except (OSError, http.client.HTTPException, Unreachable) as error:
                retry.wait_or_raise(error, retryable=True)
