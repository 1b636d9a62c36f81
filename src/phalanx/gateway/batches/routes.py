"""The handlers of `/v1/files` and `/v1/batches`."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from math import inf
from typing import Any, Final

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.http import HttpProcessingError

from phalanx.batches import driver
from phalanx.batches.batch_job import WINDOW_S, BatchPacker, batch_keys, batch_labels, check_metadata
from phalanx.batches.batch_view import (
    BATCH_PREFIX,
    ERRORS_PREFIX,
    OUTPUT_PREFIX,
    batch_view,
    refused_view,
)
from phalanx.batches.input_check import ENDPOINTS, InputCheck, InputError
from phalanx.core.errors import BadRequest, NotPermitted, PhalanxError
from phalanx.core.work.users import Action
from phalanx.gateway.batches.file_store import FileStore, RefusedBatch, StoredFile, file_view, new_refused_id
from phalanx.gateway.batches.head_calls import HeadCalls
from phalanx.gateway.head_link import HeadAway, HeadLink, may_use
from phalanx.gateway.key_check import key_of, user_of
from phalanx.gateway.refusals import Refused
from phalanx.gateway.services import ServiceTable
from phalanx.wire.api.head import CurrentUser
from phalanx.wire.api.jobs import JobView

PURPOSES: Final = ("batch",)
STALL_S: Final = 60.0  # an upload that sends nothing for this long is ended
PACKERS_MAX: Final = 2  # files that are checked at once; each keeps a core busy
_FIELD_MAX: Final = 1024
_BODY_MAX: Final = 1 << 16
_LIST_MAX: Final = 100
_CALLS_AT_ONCE: Final = 8
_PIECE_BYTES: Final = 1 << 18
_OUTPUTS: Final = {OUTPUT_PREFIX: driver.OUTPUT, ERRORS_PREFIX: driver.ERRORS}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _BatchBody(msgspec.Struct, frozen=True, kw_only=True):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


class BatchRoutes:
    """The handlers of one gateway.

    Args:
        head: checks keys, and gets jobs.
        table: the services.
        store: of files.
    """

    def __init__(self, head: HeadLink, table: ServiceTable, store: FileStore) -> None:
        self._head, self._table, self._store = head, table, store
        self._packers = asyncio.Semaphore(PACKERS_MAX)

    def add_to(self, app: web.Application) -> None:
        """Add the routes."""
        for method, path, handler in (
            ("POST", "/v1/files", self.create_file),
            ("GET", "/v1/files", self.list_files),
            ("GET", "/v1/files/{file_id}", self.show_file),
            ("DELETE", "/v1/files/{file_id}", self.delete_file),
            ("GET", "/v1/files/{file_id}/content", self.file_content),
            ("POST", "/v1/batches", self.create_batch),
            ("GET", "/v1/batches", self.list_batches),
            ("GET", "/v1/batches/{batch_id}", self.show_batch),
            ("POST", "/v1/batches/{batch_id}/cancel", self.cancel_batch),
        ):
            app.router.add_route(method, path, _refusing(handler))

    # ---- files ------------------------------------------------------------------------------------------------------

    async def create_file(self, request: web.Request) -> web.StreamResponse:
        """Store the file of a form, as it comes."""
        user = await self._submitter(request)
        if not request.content_type.startswith("multipart/"):
            raise Refused(400, "send a form (multipart/form-data) with file and purpose", "invalid_body")
        upload, done = await asyncio.to_thread(self._store.begin, user.user), False
        try:
            purpose, filename = "", ""
            try:
                reader = await request.multipart()
                while (part := await _within(reader.next())) is not None:
                    if not isinstance(part, aiohttp.BodyPartReader):
                        raise Refused(400, "the form is nested", "invalid_body")
                    if part.name == "file" and not filename:
                        filename = (part.filename or "requests.jsonl")[:255]
                        while piece := await _within(part.read_chunk(_PIECE_BYTES)):
                            await asyncio.to_thread(upload.write, piece)
                    else:
                        text = (await _within(part.read_chunk(_FIELD_MAX))).decode("utf-8", "replace")
                        if part.name == "purpose":
                            purpose = text.strip()
                        while await _within(part.read_chunk(_PIECE_BYTES)):
                            pass
            except (ValueError, AssertionError, HttpProcessingError, web.RequestPayloadError) as error:
                raise Refused(400, f"the form cannot be read: {type(error).__name__}", "invalid_body") from None
            if not filename:
                raise Refused(400, "the form has no file", "missing_required_parameter")
            if purpose not in PURPOSES:
                raise Refused(400, f"purpose must be {', '.join(PURPOSES)}, not {purpose[:40]!r}", "invalid_value")
            stored = await asyncio.to_thread(upload.finish, filename, purpose)
            done = True
        finally:
            if not done:
                upload.abort()
        return _json(stored.view())

    async def list_files(self, request: web.Request) -> web.StreamResponse:
        """List uploaded files."""
        user = await self._submitter(request)
        found = [one.view() for one in await asyncio.to_thread(self._store.files, user.user)]
        purpose = request.query.get("purpose")
        if request.query.get("order") == "asc":
            found.reverse()
        return _json(_page(request, [one for one in found if purpose in (None, one["purpose"])], most=10_000))

    async def show_file(self, request: web.Request) -> web.StreamResponse:
        """Show a file, uploaded or of answers."""
        user = await self._submitter(request)
        file_id = request.match_info["file_id"]
        stored = await asyncio.to_thread(self._store.file, file_id, user.user)
        if stored is not None:
            return _json(stored.view())
        job, name, calls = await self._answers(request, file_id)
        entry = await calls.output_entry(str(job.id), name)
        if entry is None:
            raise _no_file(file_id)
        return _json(file_view(file_id, name, "batch_output", entry.size_bytes, entry.modified_s))

    async def delete_file(self, request: web.Request) -> web.StreamResponse:
        """Delete an uploaded file. Batches that were made from it go on."""
        user = await self._submitter(request)
        file_id = request.match_info["file_id"]
        stored = await asyncio.to_thread(self._store.file, file_id, user.user)
        if stored is None:
            job, _, _ = await self._answers(request, file_id)
            raise Refused(400, f"the answers belong to job {job.id}, whose outputs the head keeps", "not_deletable")
        await asyncio.to_thread(self._store.delete, stored)
        return _json({"id": file_id, "object": "file", "deleted": True})

    async def file_content(self, request: web.Request) -> web.StreamResponse:
        """Send the bytes of a file."""
        user = await self._submitter(request)
        file_id = request.match_info["file_id"]
        stored = await asyncio.to_thread(self._store.file, file_id, user.user)
        if stored is not None:
            return await self._send_stored(request, stored)
        job, name, calls = await self._answers(request, file_id)
        async with calls.output(str(job.id), name) as (size, pieces):
            answer = await _begin(request, size)
            try:
                async for piece in pieces:
                    await answer.write(piece)
            except HeadAway as error:  # the client sees that bytes are missing
                answer.force_close()
                raise ConnectionResetError(str(error)) from None
        await answer.write_eof()
        return answer

    async def _send_stored(self, request: web.Request, stored: StoredFile) -> web.StreamResponse:
        try:
            file = await asyncio.to_thread(self._store.open, stored)
        except FileNotFoundError:
            raise _no_file(stored.id) from None
        with file:
            answer = await _begin(request, stored.bytes)
            while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
                await answer.write(piece)
        await answer.write_eof()
        return answer

    async def _answers(self, request: web.Request, file_id: str) -> tuple[JobView, str, HeadCalls]:
        """Return the job and name of a file of answers.

        Raises:
            Refused: the user may see no such file.
        """
        calls = HeadCalls(self._head, key_of(request))
        for prefix, name in _OUTPUTS.items():
            if file_id.startswith(prefix):
                job = await calls.job(file_id.removeprefix(prefix))
                if job is not None:
                    return job, name, calls
        raise _no_file(file_id)

    # ---- batches ----------------------------------------------------------------------------------------------------

    async def create_batch(self, request: web.Request) -> web.StreamResponse:
        """Check a file, and submit the job that answers it."""
        user = await self._submitter(request)
        wanted = await _batch_body(request)
        metadata = wanted.metadata or {}
        stored = await asyncio.to_thread(self._store.file, wanted.input_file_id, user.user)
        if stored is None:
            raise _no_file(wanted.input_file_id)
        now_s = time.time()
        packer = BatchPacker(wanted.endpoint)
        try:
            async with self._packers:
                try:
                    source = await asyncio.to_thread(self._store.open, stored)
                except FileNotFoundError:
                    raise _no_file(stored.id) from None
                with source:
                    await asyncio.to_thread(packer.pack_input, source)
            check = packer.check
            service = self._table.services.get(check.model)
            if not check.errors and (service is None or not self._may_use(user, check.model)):
                text = f"there is no model {check.model[:80]!r} that this key may use"
                check.errors.append(InputError(code="model_not_found", message=text, param="body.model"))
            if check.errors or service is None:
                return _json(await self._refuse(user, wanted, check, now_s))
            calls = HeadCalls(self._head, key_of(request))
            reply = await calls.service_keys(check.model)
            batch = uuid.uuid4().hex
            packed = await asyncio.to_thread(
                packer.finish, reply, batch=batch, revision=service.view.revision, expires_s=now_s + WINDOW_S
            )
            labels = batch_labels(check, stored.id, window_s=WINDOW_S, metadata=metadata)
            keys = batch_keys(check.model, reply, packed.sha256, labels=labels, name=f"batch-{check.model}")
            await calls.upload(packed)
            job = await calls.submit(keys, batch)
        finally:
            packer.close()
        return _json(batch_view(job, None))

    async def _refuse(self, user: CurrentUser, wanted: _BatchBody, check: InputCheck, now_s: float) -> dict[str, Any]:
        """Keep a batch that failed its check, as OpenAI does: its creation succeeds, and its state says why it is not run."""
        batch_id = new_refused_id()
        view = refused_view(
            batch_id,
            wanted.input_file_id,
            wanted.endpoint,
            now_s,
            WINDOW_S,
            check.errors,
            total=check.lines,
            metadata=wanted.metadata or {},
        )
        refused = RefusedBatch(id=batch_id, user=user.user, created_s=now_s, view=view)
        await asyncio.to_thread(self._store.add_refused, refused)
        return view

    async def list_batches(self, request: web.Request) -> web.StreamResponse:
        """List the user's batches, newest first."""
        user = await self._submitter(request)
        calls, after, limit = (
            HeadCalls(self._head, key_of(request)),
            request.query.get("after", ""),
            _limit(request, 20),
        )
        before_seq, before_s = None, inf
        if after:
            last = await self._find(after, user, calls)
            before_s = last.created_s if isinstance(last, RefusedBatch) else last.submit_s
            before_seq = None if isinstance(last, RefusedBatch) else last.seq
        stored = await asyncio.to_thread(self._store.refused, user.user)
        found = [(one.created_s, one.id, one.view) for one in stored if one.created_s < before_s][: limit + 1]
        jobs: list[JobView] = []
        while len(jobs) <= limit:
            page = await calls.jobs(str(user.user), before_seq=before_seq, limit=_LIST_MAX)
            jobs += [job for job in page.jobs if job.submit_s <= before_s]
            before_seq = page.next
            if before_seq is None:
                break
        shown = {str(job.id): job for job in jobs[: limit + 1]}
        order = sorted([*found, *((job.submit_s, key, None) for key, job in shown.items())], key=lambda one: -one[0])
        busy = asyncio.Semaphore(_CALLS_AT_ONCE)

        async def view(key: str, refused: dict[str, Any] | None) -> dict[str, Any]:
            if refused is not None:
                return refused
            async with busy:
                return batch_view(shown[key], await calls.progress(key))

        views = await asyncio.gather(*(view(key, refused) for _, key, refused in order[:limit]))
        return _json(_list(list(views), more=len(order) > limit))

    async def show_batch(self, request: web.Request) -> web.StreamResponse:
        """Show a batch."""
        user = await self._submitter(request)
        found, calls = await self._batch(request, user)
        if isinstance(found, RefusedBatch):
            return _json(found.view)
        job = found
        return _json(batch_view(job, await calls.progress(str(job.id))))

    async def cancel_batch(self, request: web.Request) -> web.StreamResponse:
        """Cancel a batch. What was answered stays."""
        user = await self._submitter(request)
        found, calls = await self._batch(request, user)
        if isinstance(found, RefusedBatch) or found.state.terminal:
            raise Refused(409, "the batch has ended", "batch_ended")
        job = await calls.cancel(str(found.id))
        return _json(batch_view(job, await calls.progress(str(job.id))))

    async def _batch(self, request: web.Request, user: CurrentUser) -> tuple[RefusedBatch | JobView, HeadCalls]:
        calls = HeadCalls(self._head, key_of(request))
        return await self._find(request.match_info["batch_id"], user, calls), calls

    async def _find(self, batch_id: str, user: CurrentUser, calls: HeadCalls) -> RefusedBatch | JobView:
        """Return a batch: its job, or one that has none because its check failed.

        Raises:
            Refused: the user may see no such batch.
        """
        refused = await asyncio.to_thread(self._store.refused_batch, batch_id, user.user)
        if refused is not None:
            return refused
        job = await calls.job(batch_id.removeprefix(BATCH_PREFIX)) if batch_id.startswith(BATCH_PREFIX) else None
        if job is None:
            raise _no_batch(batch_id)
        return job

    # ---- users ------------------------------------------------------------------------------------------------------

    async def _submitter(self, request: web.Request) -> CurrentUser:
        """Return the user of a key that may submit jobs.

        Raises:
            Refused: it may not.
        """
        user = await user_of(self._head, request)
        if Action.SUBMIT not in user.actions:
            raise Refused(403, "this key may not submit jobs, which batches are", "not_permitted")
        return user

    def _may_use(self, user: CurrentUser, model: str) -> bool:
        project = self._table.services[model].view.project
        return may_use(user, project, self._table.is_open(project))


def _refusing(handler: Handler) -> Handler:
    """Give errors OpenAI's form."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refused as refused:
            return refused.response()
        except HeadAway as error:
            text = f"the head does not answer: {error}"
            return Refused(503, text, "head_away", retry_after_s=5).response()
        except NotPermitted as error:
            return Refused(403, _text(error), "not_permitted").response()
        except BadRequest as error:
            return Refused(400, _text(error), "invalid_request").response()

    return handle


def _text(error: PhalanxError) -> str:
    return f"{error.message}: {error.hint}" if error.hint else error.message


async def _within(reading: Awaitable[Any]) -> Any:
    """Read the next part of a form.

    Raises:
        Refused: nothing came for a while.
    """
    try:
        async with asyncio.timeout(STALL_S):
            return await reading
    except TimeoutError:
        raise Refused(408, f"nothing came for {STALL_S:g} s", "timeout") from None


async def _batch_body(request: web.Request) -> _BatchBody:
    body = bytearray()
    while piece := await _within(request.content.read(_BODY_MAX)):
        body += piece
        if len(body) > _BODY_MAX:
            raise Refused(413, f"the body has at most {_BODY_MAX >> 10} KiB", "too_large")
    try:
        wanted = msgspec.json.decode(bytes(body), type=_BatchBody)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, f"the body is not that of a batch: {str(error)[:200]}", "invalid_body") from None
    if wanted.endpoint not in ENDPOINTS:
        text = f"endpoint {wanted.endpoint[:80]!r} has no batches; {', '.join(ENDPOINTS)} have"
        raise Refused(400, text, "invalid_value")
    if wanted.completion_window != "24h":
        raise Refused(400, "completion_window must be 24h", "invalid_value")
    check_metadata(wanted.metadata or {})
    return wanted


async def _begin(request: web.Request, size: int) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"Content-Type": "application/octet-stream", "Content-Length": str(size)})
    await answer.prepare(request)
    return answer


def _limit(request: web.Request, default: int, most: int = _LIST_MAX) -> int:
    text = request.query.get("limit", str(default))
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:9]) <= most:
        raise Refused(400, f"limit must be 1 to {most}", "invalid_value")
    return int(text)


def _page(request: web.Request, found: list[dict[str, Any]], *, most: int) -> dict[str, Any]:
    after, limit = request.query.get("after", ""), _limit(request, most, most)
    if after:
        at = next((number for number, one in enumerate(found, 1) if one["id"] == after), None)
        if at is None:
            raise _no_file(after)
        found = found[at:]
    return _list(found[:limit], more=len(found) > limit)


def _list(found: list[dict[str, Any]], *, more: bool) -> dict[str, Any]:
    ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"]} if found else {"first_id": None, "last_id": None}
    return {"object": "list", "data": found, **ends, "has_more": more}


def _json(body: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def _no_file(file_id: str) -> Refused:
    return Refused(404, f"there is no file {file_id[:80]!r} of this user", "file_not_found")


def _no_batch(batch_id: str) -> Refused:
    return Refused(404, f"there is no batch {batch_id[:80]!r} of this user", "batch_not_found")
