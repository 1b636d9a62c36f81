"""The files in a job's PHALANX_OUTPUT_DIR: a listing, and an archive as a stream."""

from __future__ import annotations

import os

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from phalanx.api.auth.authenticator import authorize_job
from phalanx.api.http.bodies import json_response
from phalanx.api.http.paging import fitting
from phalanx.api.http.routing import MediaType, NonNegative, RouteTable
from phalanx.api.runtime import caller_of, run_in_thread, runtime_of
from phalanx.api.views.removed_files import removal_note
from phalanx.core.errors import NotFound
from phalanx.core.ids import JobId
from phalanx.core.work.retention import RetainedFiles
from phalanx.core.work.users import Action
from phalanx.store.outputs.folder import ArchiveRest, archive_bytes, list_folder, tar_archive
from phalanx.wire.api.output import ARCHIVE_BYTES_HEADER, ARCHIVE_TIME_HEADER, FilesReply

routes = RouteTable()


@routes.get("/v1/jobs/{job_id}/files", Action.VIEW_OUTPUT, reply=FilesReply)
async def list_files(request: Request, job_id: JobId, path: str = "") -> Response:
    """List one folder of a job's outputs."""
    listing = await run_in_thread(list_folder, _folder(request, job_id), path)
    entries = fitting(listing.entries, runtime_of(request).services.limits.answer_bytes)
    if len(entries) < len(listing.entries):
        listing = msgspec.structs.replace(listing, entries=entries, truncated=True)
    return json_response(listing)


@routes.get("/v1/jobs/{job_id}/files/archive", Action.VIEW_OUTPUT, reply=MediaType.TAR)
async def archive_files(
    request: Request,
    job_id: JobId,
    path: str = "",
    after: str = "",
    offset: NonNegative = 0,
    since_ms: NonNegative = 0,
    digests: NonNegative = 0,
) -> Response:
    """Stream a job's outputs, or one file or folder of them, as a tar archive.

    An interrupted download goes on at byte `offset` of the file `after`; of the files before it, only those follow that changed after `since_ms` (Unix milliseconds).
    With `digests=1` the archive has the SHA-256 of each file.
    """
    folder = _folder(request, job_id)
    rest = ArchiveRest(after, offset, since_ms / 1000, digests=bool(digests))
    headers = {
        "content-disposition": f'attachment; filename="job-{job_id}.tar"',
        ARCHIVE_TIME_HEADER: repr(runtime_of(request).services.clock.now_s()),
    }
    size = await run_in_thread(archive_bytes, folder, path, rest)
    pieces = await run_in_thread(tar_archive, folder, path, rest)
    if size is not None:
        headers[ARCHIVE_BYTES_HEADER] = str(size)
    return StreamingResponse(pieces, media_type=MediaType.TAR.value, headers=headers)


def _folder(request: Request, job_id: JobId) -> str:
    services = runtime_of(request).services
    job = authorize_job(services.store, caller_of(request), Action.VIEW_OUTPUT, job_id)
    if job.spec.outputs:
        raise NotFound(
            f"the outputs of job {job_id} are in {job.spec.outputs}/{job.folder}",
            hint="read them there, with the credentials of the store",
        )
    folder = os.path.join(services.output_root, job.folder)
    if job.state.terminal and not os.path.isdir(folder):
        note = removal_note(services.store, job_id, RetainedFiles.OUTPUTS)
        if note:
            raise NotFound(note)
    return folder
