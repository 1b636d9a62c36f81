"""What files and batches ask of the head, with the client's own key: the head decides what its user may do."""

from __future__ import annotations

import asyncio
import os
import tarfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import IO, Final, TypeVar
from urllib.parse import quote, urlencode

import aiohttp
import msgspec

from phalanx.batches import driver
from phalanx.batches.batch_job import LABEL, PackedBatch
from phalanx.batches.batch_view import BatchProgress
from phalanx.gateway.head_link import HeadAway, HeadLink, refusal_text
from phalanx.gateway.refusals import Refused
from phalanx.wire.api.jobs import IDEMPOTENCY_HEADER, JobDetail, JobKeysReply, JobList, JobReply, JobView, SubmitReply
from phalanx.wire.api.output import FileEntry, FilesReply

T = TypeVar("T")

_PIECE_BYTES: Final = 1 << 18
_UPLOAD_SILENT_S: Final = 120.0
_SUBMIT_S: Final = 30.0
_TRIES: Final = 10  # of a submit whose answer was lost, a second apart
_PROGRESS_MAX: Final = 1 << 16
_NOT_FOUND: Final = frozenset({400, 403, 404})  # of ids that a client made up, or of another user's


class HeadCalls:
    """Calls with one client's key."""

    def __init__(self, head: HeadLink, key: str) -> None:
        self._head, self._key = head, key

    async def job(self, job_id: str) -> JobView | None:
        """A batch's job; None if no batch has this id."""
        async with self._open("GET", f"/v1/jobs/{quote(job_id, safe='')}") as answer:
            if answer.status in _NOT_FOUND:
                return None
            job = (await self._decode(answer, JobDetail)).job
        return job if LABEL in job.labels else None

    async def jobs(self, user: str, *, before_seq: int | None, limit: int) -> JobList:
        """A user's batches, newest first."""
        query = {"label": LABEL, "user": user, "limit": limit}
        if before_seq is not None:
            query["before_seq"] = before_seq
        async with self._open("GET", "/v1/jobs?" + urlencode(query)) as answer:
            return await self._decode(answer, JobList)

    async def service_keys(self, name: str) -> JobKeysReply:
        """The keys of a service.

        Raises:
            Refused: the user may not read its command.
        """
        async with self._open("GET", f"/v1/services/{quote(name, safe='')}/request") as answer:
            if answer.status == 403:
                text = f"a batch starts the command of service {name}, which only its owner and admins of its project may read"
                raise Refused(403, text, "not_permitted")
            return await self._decode(answer, JobKeysReply)

    async def upload(self, packed: PackedBatch) -> None:
        """Send an upload, unless the head has it."""
        path = f"/v1/blobs/{packed.sha256}"
        async with self._open("HEAD", path) as answer:
            if answer.status == 200:
                return
        headers = {"Content-Length": str(packed.bytes), "Content-Type": "application/octet-stream"}
        pieces = _pieces(packed.file)
        async with self._open("PUT", path, body=pieces, headers=headers, silent_s=_UPLOAD_SILENT_S) as answer:
            await self._whole(answer)

    async def submit(self, keys: Mapping[str, object], key: str) -> JobView:
        """Submit a job, once: `key` makes its repetition safe."""
        headers = {IDEMPOTENCY_HEADER: key, "Content-Type": "application/json"}
        body = msgspec.json.encode(keys)
        for turn in range(_TRIES):
            try:
                async with self._open("POST", "/v1/jobs", body=body, headers=headers, silent_s=_SUBMIT_S) as answer:
                    return (await self._decode(answer, SubmitReply)).job
            except HeadAway:
                if turn == _TRIES - 1:
                    raise
                await asyncio.sleep(1.0)
        raise AssertionError

    async def cancel(self, job_id: str) -> JobView:
        """Cancel a job."""
        path = f"/v1/jobs/{quote(job_id, safe='')}/cancel"
        headers = {"Content-Type": "application/json"}
        async with self._open("POST", path, body=b'{"why":"the batch was cancelled"}', headers=headers) as answer:
            return (await self._decode(answer, JobReply)).job

    async def progress(self, job_id: str) -> BatchProgress | None:
        """What the driver wrote last; None if it wrote nothing yet."""
        text = b""
        try:
            async with self.output(job_id, driver.PROGRESS) as (_, pieces):
                async for piece in pieces:
                    text = (text + piece)[:_PROGRESS_MAX]
            return msgspec.json.decode(text, type=BatchProgress)
        except (Refused, msgspec.MsgspecError):
            return None

    async def output_entry(self, job_id: str, name: str) -> FileEntry | None:
        """An output of a job; None if it does not exist."""
        async with self._open("GET", f"/v1/jobs/{quote(job_id, safe='')}/files?path={name}") as answer:
            if answer.status in _NOT_FOUND:
                return None
            found = (await self._decode(answer, FilesReply)).entries
        return next((one for one in found if one.path == name), None)

    @asynccontextmanager
    async def output(self, job_id: str, name: str) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        """An output of a job: its size and its bytes.

        Raises:
            Refused: it does not exist.
        """
        path = f"/v1/jobs/{quote(job_id, safe='')}/files/archive?path={name}"
        async with self._open("GET", path, silent_s=_UPLOAD_SILENT_S) as answer:
            if answer.status in _NOT_FOUND:
                raise Refused(404, f"job {job_id[:40]} has no {name}", "not_found")
            await self._checked(answer)
            size = await _first_member(answer.content)
            yield size, _limited(answer.content, size)

    @asynccontextmanager
    async def _open(
        self,
        method: str,
        path: str,
        *,
        body: bytes | AsyncIterator[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        silent_s: float = 10.0,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        async with self._head.open_as(self._key, method, path, body=body, headers=headers, silent_s=silent_s) as answer:
            if answer.status == 401:
                raise Refused(401, "this key is not valid, or has expired", "invalid_api_key")
            yield answer

    async def _decode(self, answer: aiohttp.ClientResponse, kind: type[T]) -> T:
        return msgspec.json.decode(await self._whole(answer), type=kind)

    async def _whole(self, answer: aiohttp.ClientResponse) -> bytes:
        await self._checked(answer)
        return await answer.read()

    async def _checked(self, answer: aiohttp.ClientResponse) -> None:
        """Check that the head did as it was asked.

        Raises:
            Refused: it did not.
        """
        if answer.status >= 500:
            raise HeadAway(refusal_text(answer.status, await answer.read()))
        if answer.status >= 400:
            raise Refused(answer.status, refusal_text(answer.status, await answer.read()), "refused_by_the_head")


async def _pieces(file: IO[bytes]) -> AsyncIterator[bytes]:
    file.seek(0, os.SEEK_SET)
    while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
        yield piece


async def _first_member(content: aiohttp.StreamReader) -> int:
    """Read up to the first byte of the first file of a tar archive; return its size."""
    try:
        while True:
            member = tarfile.TarInfo.frombuf(await content.readexactly(tarfile.BLOCKSIZE), "utf-8", "surrogateescape")
            if member.type not in (tarfile.XHDTYPE, tarfile.XGLTYPE):
                return member.size
            await content.readexactly(member.size + (-member.size % tarfile.BLOCKSIZE))
    except (asyncio.IncompleteReadError, tarfile.HeaderError) as error:
        raise HeadAway(f"an output came torn: {type(error).__name__}") from None


async def _limited(content: aiohttp.StreamReader, size: int) -> AsyncIterator[bytes]:
    while size > 0:
        piece = await content.read(min(size, _PIECE_BYTES))
        if not piece:
            raise HeadAway("an output ended early")
        size -= len(piece)
        yield piece
