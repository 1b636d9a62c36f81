"""The keys of a job as the head needs them: with the ids of its Slurm names, and with a copy of its working directory if needed."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, cast

from phalanx.cli.connection import shares_file_system
from phalanx.cli.errors import warn
from phalanx.cli.jobs.request.job_request import JobRequest, check_local_files
from phalanx.core.errors import BadFile

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.client.workdir_archive import WorkdirArchive
    from phalanx.core.work.spec import JobSpec


def sendable_mapping(head: Client, wanted: JobRequest) -> dict[str, object]:
    """Return the keys to send to the head, after uploading a copy of the working directory if needed.

    Raises:
        PhalanxError: the head rejects the copy, a local file is missing, or the head does not answer.
    """
    mapping = wanted.mapping
    if wanted.slurm_names is not None:
        from phalanx.cli.jobs.request.sbatch_script import resolve_slurm_names

        mapping = resolve_slurm_names(head, mapping, wanted.slurm_names)
    shared = shares_file_system(head)
    if wanted.copy or not (shared or wanted.again):
        return {**mapping, **_send_copy(head, wanted.spec)}
    if shared and (wanted.plain or not wanted.spec.upload):
        check_local_files(wanted)
    return mapping


def _send_copy(head: Client, spec: JobSpec) -> dict[str, object]:
    """Upload a copy of the working directory; return the job keys for the copy and its requirements."""
    from phalanx.cli.cells import count
    from phalanx.client.workdir_archive import archive_workdir, read_archive_member
    from phalanx.core.units import format_bytes
    from phalanx.node.logic.requirements import default_requirements_file

    packed = archive_workdir(spec.workdir)
    try:
        for name in packed.skipped:
            warn(f"left out of the copy: {name}")
        listed = spec.packages_file
        if listed and read_archive_member(packed, listed) is None:
            raise BadFile(f"{listed}: not in the copy of {spec.workdir}", hint="check whether a .gitignore excludes it")
        missing = head.missing_from(packed.sha256)
        if missing is not None:
            _upload(head, packed, missing)
            warn(f"uploaded a copy of {spec.workdir}: {count(packed.files, 'file')}, {format_bytes(packed.bytes)}")
        found = spec.requirements or (
            ""
            if spec.image or spec.software.has_python
            else default_requirements_file(lambda name: read_archive_member(packed, name))
        )
        return {"upload": packed.sha256, **({"requirements": found} if found else {})}
    finally:
        packed.close()


def _upload(head: Client, packed: WorkdirArchive, had_bytes: int) -> None:
    """Upload the archive with a progress bar, on from where an interrupted upload stopped."""
    from phalanx.cli.transfers.transfer_progress import ProgressReader

    bars: list[ProgressReader] = []

    def watch(body: IO[bytes]) -> IO[bytes]:
        bars.append(ProgressReader(body, label="upload: ", had_bytes=had_bytes))
        bars[-1].expect(packed.bytes - had_bytes)
        return cast("IO[bytes]", bars[-1])

    try:
        head.upload(packed.file, packed.sha256, packed.bytes, watch=watch)
    finally:
        for one in bars:
            one.clear()
