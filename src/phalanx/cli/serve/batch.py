"""`phalanx serve batch`: answers a file of requests by a job of lowest priority, and fetches the answers."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tarfile
import tempfile
import time
import uuid
from typing import TYPE_CHECKING, Any, Final

import click

from phalanx.cli.cells import count
from phalanx.cli.completion import complete_services
from phalanx.cli.connection import connect
from phalanx.cli.errors import print_error
from phalanx.cli.jobs.job_end import end_summary
from phalanx.cli.jobs.job_follower import StatusLine
from phalanx.cli.list_output import to_json
from phalanx.cli.option_types import GrammarType
from phalanx.cli.serve.rollout_options import JSON_OPTION
from phalanx.cli.serve.service_lookup import require_service
from phalanx.cli.terminal import strip_control
from phalanx.cli.wait_text import wait_text
from phalanx.core.errors import BadFile, NotFound, Unreachable
from phalanx.core.units import format_bytes, format_duration, parse_duration_s
from phalanx.core.work.states import JobState

if TYPE_CHECKING:
    from phalanx.batches.batch_job import BatchPacker
    from phalanx.batches.batch_view import BatchProgress
    from phalanx.client import Client
    from phalanx.wire.api.jobs import JobView

_POLL_S: Final = 0.5
_SHOWN: Final = 5  # errors of the file
_BAR: Final = 24
_EX_DATAERR: Final = 65
_DURATION = GrammarType("TIME", parse_duration_s)


@click.command()
@click.argument("name", metavar="SERVICE", shell_complete=complete_services)
@click.argument("file", metavar="FILE")
@click.option("-o", "--output", metavar="FILE", help="Answers go here; FILE.output.jsonl by default.")
@click.option(
    "--within", "window", type=_DURATION, default="24h", show_default=True, help="What is not answered then, expires."
)
@click.option(
    "--at-once", type=click.IntRange(1, 1024), default=128, show_default=True, help="Requests that the engine gets."
)
@click.option("--again", is_flag=True, help="Start a new batch, although one of the same file exists.")
@click.option("-d", "--detach", is_flag=True, help="Return once the job is submitted.")
@JSON_OPTION
def batch(
    name: str, file: str, output: str | None, window: str, at_once: int, again: bool, detach: bool, as_json: bool
) -> int:
    """Answer the requests of FILE (JSONL, as for OpenAI's batches) by the engine of SERVICE, on GPUs that nothing else needs.

    A job of lowest priority starts the service's command for it, and gives way to other jobs. Repeating the line goes on: with the wait, or with
    the download. Ctrl-C ends only the wait.

    Exit codes: 0 all are answered; 1 some failed, or the job did; 65 the file is wrong; 130 Ctrl-C.
    """
    head = connect()
    service = require_service(head, name).service
    out = output or f"{file.removesuffix('.jsonl')}.output.jsonl"
    file_id, endpoint = _identify(file)
    job = None if again else _earlier(head, file_id, str(service.name))
    if job is None:
        submitted = _submit(
            head, str(service.name), service.revision, file, file_id, endpoint, parse_duration_s(window), at_once
        )
        if submitted is None:
            return _EX_DATAERR
        job = submitted
    elif not as_json:
        print(f"job {job.id} has these requests already; --again starts a new one", file=sys.stderr)
    if detach:
        print(to_json({"job": job.id}, indent=2) if as_json else f"job {job.id} answers {file}")
        return 0
    return _finish(head, str(job.id), out, as_json=as_json)


def _identify(file: str) -> tuple[str, str]:
    """Return an id made from the content, and the route that its first request names.

    Raises:
        BadFile: it cannot be read.
    """
    from phalanx.batches.input_check import ENDPOINTS, FILE_BYTES_MAX, LINE_BYTES_MAX

    try:
        with open(file, "rb") as source:
            size = os.fstat(source.fileno()).st_size
            if size > FILE_BYTES_MAX:
                raise BadFile(f"{file}: {format_bytes(size)}; a batch has at most {format_bytes(FILE_BYTES_MAX)}")
            digest = hashlib.file_digest(source, "sha256").hexdigest()
            source.seek(0)
            first = source.readline(LINE_BYTES_MAX)
    except OSError as error:
        raise BadFile(f"{file}: {os.strerror(error.errno or 0)}") from None
    try:
        url = json.loads(first)["url"]
    except (ValueError, TypeError, KeyError, RecursionError):
        url = ""
    return f"sha256-{digest[:32]}", url if url in ENDPOINTS else ENDPOINTS[0]


def _earlier(head: Client, file_id: str, service: str) -> JobView | None:
    """Return the newest batch of this file that may still give its answers."""
    from phalanx.batches.batch_job import LABEL
    from phalanx.core.work.services.service_use import BATCH_SERVICE_LABEL

    found = head.jobs(
        user=str(head.me().user), label=[f"{LABEL}={file_id}", f"{BATCH_SERVICE_LABEL}={service}"], limit=1
    ).jobs
    alive = found and (not found[0].state.terminal or found[0].state is JobState.SUCCEEDED)
    return found[0] if alive else None


def _submit(
    head: Client, name: str, revision: int, file: str, file_id: str, endpoint: str, window_s: float, at_once: int
) -> JobView | None:
    """Check the file and submit the job; None if the file is wrong."""
    from phalanx.batches.batch_job import BatchPacker, batch_keys, batch_labels

    packer = BatchPacker(endpoint)
    try:
        with open(file, "rb") as source:
            packer.pack_input(source)
        if not _good(packer, file, name):
            return None
        reply, key = head.service_keys(name), uuid.uuid4().hex
        packed = packer.finish(reply, batch=key, revision=revision, expires_s=time.time() + window_s, at_once=at_once)
        head.upload(packed.file, packed.sha256, packed.bytes)
        labels = batch_labels(packer.check, file_id, window_s=window_s)
        job = head.submit(batch_keys(name, reply, packed.sha256, labels=labels, name=f"batch-{name}"), key=key).job
    finally:
        packer.close()
    text = f"job {job.id} answers {count(packer.check.lines, 'request')} of {file}, with the engine of service {name}"
    print(strip_control(text), file=sys.stderr)
    return job


def _good(packer: BatchPacker, file: str, name: str) -> bool:
    check = packer.check
    for one in check.errors[:_SHOWN]:
        where = f"{file}:{one.line}" if one.line else file
        print_error(strip_control(f"{where}: {one.message}"), "", _EX_DATAERR)
    if check.wrong > _SHOWN:
        print(f"and {check.wrong - _SHOWN} more", file=sys.stderr)
    if not check.errors and check.model != name:
        print_error(strip_control(f"{file}: body.model is {check.model[:80]!r}, not {name}"), "", _EX_DATAERR)
        return False
    return not check.errors


def _finish(head: Client, job_id: str, out: str, *, as_json: bool) -> int:
    """Wait for the end of a batch and fetch its answers."""
    from phalanx.batches import driver

    status, begun_s, first = StatusLine(), time.monotonic(), -1
    try:
        while not (job := head.job(job_id).job).state.terminal:
            progress = _progress(head, job_id)
            first = (0 if progress is None else progress.completed + progress.failed) if first < 0 else first
            status.show(_line(job, progress, first, time.monotonic() - begun_s))
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        status.clear()
        print(f"job {job_id} goes on; the same line waits for it again", file=sys.stderr)
        raise
    finally:
        status.clear()
    progress = _progress(head, job_id)
    written = {}
    errors_file = f"{out.removesuffix('.jsonl')}.errors.jsonl"
    for wanted, target in ((driver.OUTPUT, out), (driver.ERRORS, errors_file)):
        size = _fetch(head, job_id, wanted, target)
        if size:
            written[target] = size
    done, failed = (0, 0) if progress is None else (progress.completed, progress.failed)
    if as_json:
        record: dict[str, Any] = {"job": job_id, "state": job.state, "completed": done, "failed": failed}
        print(to_json(record | {"files": list(written)}, indent=2))
    else:
        if job.state is not JobState.SUCCEEDED:
            print(strip_control(end_summary(job)), file=sys.stderr)
        files = "".join(f"; {target} {format_bytes(size)}" for target, size in written.items())
        print(strip_control(f"{done} answered, {failed} failed{files}"))
    return 0 if job.state is JobState.SUCCEEDED and not failed else 1


def _line(job: JobView, progress: BatchProgress | None, first: int, waited_s: float) -> str:
    if job.state is JobState.PENDING:
        return f"job {job.id} waits: {wait_text(job.reason, job.detail)}"
    if progress is None or not progress.total:
        return f"job {job.id} starts the engine on {', '.join(job.nodes)}"
    done = progress.completed + progress.failed
    share = done / progress.total
    bar = "#" * int(share * _BAR) + "." * (_BAR - int(share * _BAR))
    rate = (done - first) / waited_s if waited_s > 0 else 0.0
    left = f", {format_duration((progress.total - done) / rate)} left" if rate > 0 else ""
    failed = f", {progress.failed:,} failed" if progress.failed else ""
    return f"[{bar}] {done:,} of {progress.total:,}{failed}, {rate:,.1f} a second{left}"


def _progress(head: Client, job_id: str) -> BatchProgress | None:
    import msgspec

    from phalanx.batches import driver
    from phalanx.batches.batch_view import BatchProgress

    with tempfile.TemporaryFile() as file:
        try:
            head.download_archive(job_id, file, driver.PROGRESS)
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:") as tar:
                member = tar.next()
                found = None if member is None else tar.extractfile(member)
                return None if found is None else msgspec.json.decode(found.read(), type=BatchProgress)
        except (NotFound, tarfile.TarError, msgspec.MsgspecError):
            return None


def _fetch(head: Client, job_id: str, name: str, target: str) -> int:
    """Fetch one file of answers; it gets its name when it is whole. Returns its size; 0 if it does not exist."""
    with tempfile.TemporaryFile(dir=os.path.dirname(os.path.abspath(target))) as packed:
        for last in (False, True):
            packed.seek(0)
            packed.truncate()
            try:
                head.download_archive(job_id, packed, name)
                break
            except NotFound:
                return 0
            except Unreachable:
                if last:
                    raise
        packed.seek(0)
        with tarfile.open(fileobj=packed, mode="r:") as tar:
            member = tar.next()
            source = None if member is None else tar.extractfile(member)
            if member is None or source is None or not member.size:
                return 0
            part = f"{target}.part"
            try:
                with open(part, "wb") as file:
                    while piece := source.read(1 << 20):
                        file.write(piece)
                os.replace(part, target)
            except OSError as error:
                raise BadFile(f"{target}: {os.strerror(error.errno or 0)}") from None
            return member.size
