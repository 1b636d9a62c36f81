"""The files in a job's PHALANX_OUTPUT_DIR: a listing, and an archive as a stream."""

from __future__ import annotations

import os

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from phalanx.api.bodies import reply
from phalanx.api.folders import list_folder, pack
from phalanx.api.gate import touch
from phalanx.api.routes import Routes, Shown
from phalanx.api.runtime import caller_of, off_loop, runtime_of
from phalanx.core.ids import JobId
from phalanx.core.work.people import Action
from phalanx.wire.api.output import FilesReply

routes = Routes()


@routes.get("/v1/jobs/{job_id}/files", Action.SEE_OUTPUT, reply=FilesReply)
async def list_files(request: Request, job_id: JobId, path: str = "") -> Response:
    """List one folder of a job's outputs."""
    return reply(await off_loop(list_folder, _folder(request, job_id), path))


@routes.get("/v1/jobs/{job_id}/files/archive", Action.SEE_OUTPUT, reply=Shown.TAR)
async def archive_files(request: Request, job_id: JobId, path: str = "") -> Response:
    """Stream a job's outputs, or one file or folder of them, as a tar archive."""
    pieces = await off_loop(pack, _folder(request, job_id), path)
    disposition = f'attachment; filename="job-{job_id}.tar"'
    return StreamingResponse(pieces, media_type=Shown.TAR.value, headers={"content-disposition": disposition})


def _folder(request: Request, job_id: JobId) -> str:
    parts = runtime_of(request).parts
    # The job's id becomes part of a path only after the store has confirmed that the job exists.
    job = touch(parts.store, caller_of(request), Action.SEE_OUTPUT, job_id)
    return os.path.join(parts.output_root, job.id)
