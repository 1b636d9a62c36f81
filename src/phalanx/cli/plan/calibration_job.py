"""The calibration job: submit it, show its progress, and fetch its samples. It is cancelled if the command stops early."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tarfile
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec

from phalanx.cli.cells import bar, count
from phalanx.cli.connection import shares_file_system
from phalanx.cli.jobs.job_end import end_summary, exit_code
from phalanx.cli.jobs.job_follower import StatusLine
from phalanx.cli.plan.calibration_nodes import CalibrationNodes, gpu_of
from phalanx.cli.terminal import strip_control, terminal
from phalanx.cli.wait_text import wait_text
from phalanx.core.errors import PhalanxError, TooLarge
from phalanx.core.fleet.hostlist import fold_hostlist
from phalanx.core.work.states import JobState
from phalanx.planner.calibration.profile import Profile
from phalanx.planner.calibration.record_codec import decode_record
from phalanx.planner.calibration.samples import CalibratedNode, Samples, build_profile
from phalanx.wire.api.output import StateEvent

if TYPE_CHECKING:
    from phalanx.client import Client

SAMPLES_FILE: Final = "calibration.json"  # written by phalanx.torch.calibrate.main_program
PROGRESS_LINE: Final = re.compile(r"calibrate: (\d+)/(\d+) (.+)")  # its progress line before each measurement
_SAMPLES_BYTES_MAX: Final = 64 << 20  # 8,192 ranks write about 10 MB
_BAR: Final = 20
_RESERVATION_TIME: Final = "40m"  # maximum length of the reservation: the job's time limit plus margin
_FAILURE_LINES: Final = 12  # last output lines to print after a failure


class CalibrationFailed(PhalanxError):
    """The job failed or left no samples. `job_code` is the exit code of the command."""

    code = "calibration_failed"

    def __init__(self, message: str, *, hint: str = "", job_code: int = 1) -> None:
        super().__init__(message, hint=hint)
        self.job_code = job_code


def build_calibration_job(
    chosen: CalibrationNodes,
    *,
    reservation: str,
    quick: bool,
    python: str,
    here: bool,
    links: bool = False,
    parts: bool = False,
) -> dict[str, Any]:
    """Build the job.

    `here`: nodes share this machine's files, so use this Python; `links`: measure only pairs of nodes; `parts`: test these nodes, without storage
    and trainings.
    """
    interpreter = python or (sys.executable if here else "python")
    return {
        "name": "measure-links" if links else "test-nodes" if parts else "calibrate",
        # -P: a module in the working directory must not shadow torch
        "run": [
            interpreter,
            "-P",
            "-m",
            "phalanx.torch.calibrate",
            *["--quick"] * quick,
            *["--links"] * links,
            *["--parts"] * parts,
        ],
        "gpus": f"{len(chosen.nodes)}x{1 if links else chosen.devices}",
        "workdir": "/",
        "time": "10m" if quick else "30m",
        **({"reservation": reservation} if reservation else {}),
        **({"nodelist": fold_hostlist(chosen.names)} if parts else {}),
    }


@contextlib.contextmanager
def reserve_nodes(head: Client, chosen: CalibrationNodes, *, only: bool, name: str, why: str) -> Iterator[str]:
    """Reserve the nodes, since a job cannot name its nodes; release them at the end. Yields "" unless `only` these are wanted."""
    if not only:
        yield ""
        return
    reservation = f"{name}-{time.time():.0f}"
    head.reserve(reservation, chosen.names, _RESERVATION_TIME, users=[head.me().user], why=why)
    try:
        yield reservation
    finally:
        head.unreserve(reservation)


def run_calibration(
    head: Client,
    chosen: CalibrationNodes,
    *,
    reservation: str,
    quick: bool,
    python: str,
    links: bool = False,
    parts: bool = False,
) -> Profile:
    """Run the job to its end and return its profile.

    Raises:
        CalibrationFailed: the job failed.
        KeyboardInterrupt: on Ctrl-C, after cancelling the job.
    """
    job = build_calibration_job(
        chosen,
        reservation=reservation,
        quick=quick,
        python=python,
        here=shares_file_system(head),
        links=links,
        parts=parts,
    )
    job_id = head.submit(job).id
    each = "" if links else f" x {chosen.devices}"
    print(f"job {job_id}: {count(len(chosen.nodes), 'node')}{each}", file=sys.stderr, flush=True)
    try:
        _follow(head, job_id)
    except CalibrationFailed:
        raise
    except BaseException:
        head.cancel(job_id, "the calibration command was interrupted")
        print(f"\ncancelled job {job_id}", file=sys.stderr, flush=True)
        raise
    return build_profile(_fetch(head, job_id), _members(head, job_id, chosen), job=job_id)


def _follow(head: Client, job_id: str) -> None:
    """Show progress until the job has ended.

    Raises:
        CalibrationFailed: the job failed; its last output lines were printed.
    """
    status, last_lines = StatusLine(), deque[str](maxlen=_FAILURE_LINES)
    partial_lines: dict[str, str] = {}  # incomplete lines by stream: ranks interleave their output
    try:
        for event in head.follow_logs(job_id, rank="all"):
            if event.kind == "log":
                stream = event.fields["stream"]
                *lines, partial_lines[stream] = (partial_lines.get(stream, "") + event.fields["text"]).split("\n")
                for line in lines:
                    _draw(line, status, last_lines)
            elif event.kind == "state":
                state = msgspec.convert(event.fields, StateEvent)
                if state.state is JobState.PENDING:
                    status.show(f"waiting: {wait_text(state.reason, state.detail) or 'not scheduled yet'}")
    finally:
        status.clear()
    job = head.job(job_id).job
    if job.state is not JobState.SUCCEEDED:
        for line in last_lines:
            print(strip_control(line), file=sys.stderr)
        raise CalibrationFailed(
            end_summary(job), hint=f"phalanx logs {job_id}", job_code=exit_code(job.state, job.exit_code)
        )


def _draw(line: str, status: StatusLine, last_lines: deque[str]) -> None:
    found = PROGRESS_LINE.fullmatch(line.strip())
    if found is None:
        if line.strip():
            last_lines.append(line)
        return
    number, total = int(found[1]), int(found[2])
    screen = terminal(sys.stderr)
    drawn = f"{bar((number - 1) / total, _BAR, screen)} " if screen.interactive else ""
    status.show(f"{drawn}{number}/{total} {found[3]}")


def _fetch(head: Client, job_id: str) -> Samples:
    """Fetch the samples that rank 0 wrote.

    Raises:
        CalibrationFailed: the samples are missing or invalid.
    """
    archive = _BoundedFile()
    head.download_archive(job_id, archive, SAMPLES_FILE)
    archive.seek(0)
    try:
        with tarfile.open(fileobj=archive) as tar:
            files = [tar.extractfile(member) for member in tar.getmembers() if member.isreg()]
            raw = files[0].read() if files and files[0] is not None else b""
        return decode_record(Samples, json.loads(raw))
    except (tarfile.TarError, ValueError, RecursionError) as error:
        raise CalibrationFailed(f"job {job_id} left no samples: {error}", hint=f"phalanx logs {job_id}") from None


class _BoundedFile(io.BytesIO):
    """An in-memory file with a size limit."""

    def write(self, data: Any, /) -> int:
        """Append data.

        Raises:
            TooLarge: the limit is exceeded.
        """
        if self.tell() + len(data) > _SAMPLES_BYTES_MAX:
            raise TooLarge(
                f"the samples exceed {_SAMPLES_BYTES_MAX >> 20} MiB", hint="check that the job is a calibration"
            )
        return super().write(data)


def _members(head: Client, job_id: str, chosen: CalibrationNodes) -> list[CalibratedNode]:
    """Return the job's nodes by node rank."""
    known = {node.id: node for node in chosen.nodes}
    grants = sorted(head.job(job_id).attempts[-1].grants, key=lambda grant: grant.node_rank)
    unexpected = [grant.node_id for grant in grants if grant.node_id not in known]
    if unexpected:
        raise CalibrationFailed(
            f"job {job_id} ran on {unexpected[0]}, which was not selected",
            hint="the nodes have changed; calibrate again",
        )
    return [
        CalibratedNode(node=grant.node_id, gpu=gpu_of(known[grant.node_id]), virtual=known[grant.node_id].virtual)
        for grant in grants
    ]
