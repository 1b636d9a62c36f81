"""Handles a rank's report of a checkpoint: passes it on, or uploads the checkpoint to the head first."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from phalanx.core.jsonline import finite_float
from phalanx.node.logic.events import CheckpointReported
from phalanx.node.logic.local_copies import in_object_store, stored_checkpoint_path
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.member.rank_reports import RankReport
from phalanx.node.transfer.checkpoint_upload import CheckpointUpload, CheckpointUploader
from phalanx.node.transfer.object_checkpoints import ObjectUpload
from phalanx.wire.rank import ReportKind

_WHOLE_MAX: Final = 2**63 - 1  # the range of the head's database
_log = logging.getLogger(__name__)


def handle_checkpoint_report(
    member: MemberRuntime,
    report: RankReport,
    uploader: CheckpointUploader,
    *,
    note: Callable[[str], None],
    before_upload: Callable[[], None],
    publish: Callable[[CheckpointReported], None],
) -> None:
    """Handle a report of kind CHECKPOINT or SHARDS; ignore others. `publish` is called once a job may resume from it, `before_upload` before its upload."""
    if report.kind not in (ReportKind.CHECKPOINT, ReportKind.SHARDS):
        return
    fields = report.fields
    try:
        saved = CheckpointReported(
            key=member.key,
            step=_whole(fields["step"]),
            path=_text(fields["path"]),
            digest=_text(fields["digest"]),
            size_bytes=_whole(fields.get("bytes", 0)),
            stall_s=finite_float(fields.get("stall_s")) or 0.0,
            write_s=finite_float(fields.get("write_s")) or 0.0,
            at_s=time.time(),
        )
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        _log.warning("job %s: rank %d sent an invalid checkpoint report: %r", member.key.job_id, report.rank, error)
        note(f"the checkpoint report of rank {report.rank} is invalid and skipped: {error!r}")
        return
    path = stored_checkpoint_path(member.prepare, member.checkpoints, saved.path)
    first = report.kind is ReportKind.CHECKPOINT
    if path is None:
        if first and member.may_publish:
            publish(saved)
        return
    kept = replace(saved, path=path)
    objects = (
        ObjectUpload(member=member, url=path, folder=saved.path, local_digest=saved.digest)
        if in_object_store(member.prepare)
        else None
    )

    def publish_stored() -> None:
        publish(kept if objects is None else replace(kept, digest=objects.digest))

    uploader.submit(
        CheckpointUpload(
            job_id=member.key.job_id,
            epoch=member.key.epoch,
            step=saved.step,
            digest=saved.digest,
            folder=saved.path,
            note=note,
            before_upload=before_upload,
            account=member.account,
            on_stored=publish_stored if first else None,
            objects=objects,
            awaited_by_ranks=bool(fields.get("waited", False)),
        )
    )


def _whole(value: Any) -> int:
    """Parse a count.

    Raises:
        ValueError, TypeError, OverflowError: not a count, or out of range.
    """
    number = int(value)
    if not 0 <= number <= _WHOLE_MAX:
        raise ValueError("a number below 0 or above 63 bits")
    return number


def _text(value: object) -> str:
    """Check a text.

    Raises:
        TypeError, ValueError: not a text, or not valid UTF-8.
    """
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} instead of text")
    value.encode()
    if "\0" in value:
        raise ValueError("a NUL in a text")
    return value
