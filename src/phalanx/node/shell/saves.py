"""What a supervisor does with a rank's word of a checkpoint: passes it on, or first has the checkpoint brought to the head."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from phalanx.node.logic.happenings import CheckpointReported
from phalanx.node.logic.kept import head_path
from phalanx.node.shell.porter import Porter, Upload
from phalanx.node.shell.present import Present
from phalanx.node.shell.reports import RankReport
from phalanx.wire.rank import ReportKind

_log = logging.getLogger(__name__)


def hear(
    present: Present,
    report: RankReport,
    porter: Porter,
    *,
    note: Callable[[str], None],
    before: Callable[[], None],
    publish: Callable[[CheckpointReported], None],
) -> None:
    """Take a report of kind CHECKPOINT or SHARDS; others are none of ours. `publish` is called once a resume may rest on it, `before` before it travels."""
    if report.kind not in (ReportKind.CHECKPOINT, ReportKind.SHARDS):
        return
    fields = report.fields
    try:
        saved = CheckpointReported(
            key=present.key, step=int(fields["step"]), path=str(fields["path"]), digest=str(fields["digest"]),
            size_bytes=int(fields.get("bytes", 0)), stall_s=float(fields.get("stall_s", 0.0)),
            write_s=float(fields.get("write_s", 0.0)), at_s=time.time(),
        )  # fmt: skip
    except (KeyError, ValueError, TypeError) as error:
        _log.warning("job %s: rank %d reports a checkpoint without %s", present.key.job_id, report.rank, error)
        return
    path = head_path(present.prepare, present.checkpoints, saved.path)
    first = report.kind is ReportKind.CHECKPOINT
    if path is None:
        if first and present.publishes:
            publish(saved)
        return
    kept = replace(saved, path=path)
    porter.put(
        Upload(
            job_id=present.key.job_id, epoch=present.key.epoch, step=saved.step, digest=saved.digest, folder=saved.path, note=note,
            before=before, account=present.account,
            kept=(lambda: publish(kept)) if first else None, waited=bool(fields.get("waited", False)),
        )
    )  # fmt: skip
